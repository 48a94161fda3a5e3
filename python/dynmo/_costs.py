# SPDX-License-Identifier: Apache-2.0
"""Converts the costs of a model's layers, from every form that users have, to the dict that the core reads."""
from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Union

from .errors import BadInputError

FORMAT = "dynmo-profile-1"
WANTED = (
    "wanted a profile (dict or path), a list of layers, a DataFrame or dict of columns such as forward_s, "
    "or a Hugging Face config"
)


def read_json(path: Union[str, os.PathLike[str]]) -> Any:
    """Returns the content of a JSON file. Its format is checked where it is used."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise BadInputError(f"{os.fspath(path)}: {error}".replace("\n", " ")) from error


def plain(value: Any) -> Any:
    """Converts arrays of numpy and similar types to lists. The core reads other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _layers_of_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    lists = {}
    for name, column in columns.items():
        values = plain(column)
        if not isinstance(values, (list, tuple)):
            raise BadInputError(f"costs: column {name} is of type {type(column).__name__}, wanted a value for each layer")
        lists[str(name)] = values
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        raise BadInputError(f"costs: the columns have unequal lengths {lengths}, wanted a value for each layer")
    return [dict(zip(lists, row)) for row in zip(*lists.values())]


def _from_mapping(costs: Mapping[str, Any]) -> dict[str, Any]:
    if "model_type" in costs:
        return {"config": dict(costs)}
    if "layers" in costs:
        return {"costs": {"format": FORMAT, **costs}}
    return {"costs": {"format": FORMAT, "layers": _layers_of_columns(costs)}}


def question_of(costs: Any) -> dict[str, Any]:
    """Returns the key `costs` or `config` of a question."""
    if isinstance(costs, (str, os.PathLike)):
        costs = read_json(costs)
    elif hasattr(costs, "to_dict") and hasattr(costs, "columns"):  # a DataFrame
        costs = {name: costs[name] for name in costs.columns}
    elif hasattr(costs, "to_dict") and hasattr(costs, "model_type"):  # transformers.PretrainedConfig
        costs = json.loads(json.dumps(costs.to_dict(), default=str))  # as in its file: some keys are numbers
    elif getattr(getattr(costs, "dtype", None), "names", None):  # a structured array of numpy
        costs = {name: costs[name] for name in costs.dtype.names}
    if isinstance(costs, Mapping):
        return _from_mapping(costs)
    if isinstance(costs, (list, tuple)):
        return {"costs": {"format": FORMAT, "layers": [dict(layer) if isinstance(layer, Mapping) else layer for layer in costs]}}
    raise BadInputError(f"costs are of type {type(costs).__name__}, {WANTED}")
