#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The steps of a Dockerfile as lines of a shell, which scripts/image carries out where no builder runs (scripts/image-stages).

usage: scripts/dockerfile_steps.py FILE [NAME=VALUE]...

NAME=VALUE is a build argument. A step is one of
  stage NAME FROM                                       a stage begins as a copy of an earlier one, or of `base`
  folder STAGE PATH                                     WORKDIR
  copy STAGE FROM DESTINATION SOURCE...                 FROM is an earlier stage, or empty for the context
  run STAGE USER FOLDER COMMAND NAME=VALUE...           a command for /bin/sh
  image STAGE ENTRYPOINT USER FOLDER NAME=VALUE...      what a stage is left with; a container has these
A stage without a name has its number, as under Docker. An instruction, an option or a form that is not listed here is refused: one
line, exit code 2.
"""
import dataclasses
import json
import pathlib
import posixpath
import re
import shlex
import sys

KNOWN = ("ARG", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER", "WORKDIR")
NAME = r"[A-Za-z_]\w*"


class Refusal(Exception):
    """One line for the user."""


@dataclasses.dataclass
class Stage:
    """What an image of a stage has beside its files, and the arguments, which end with the stage."""
    name: str
    user: str = "root"
    folder: str = "/"
    entrypoint: tuple = ()
    variables: dict = dataclasses.field(default_factory=dict)
    arguments: dict = dataclasses.field(default_factory=dict)


def instructions(text):
    """(number of the first line, name, the rest) of each instruction, without comments and ends of lines."""
    first, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.rstrip()
        if not first and re.match(r"#\s*(escape|syntax|check)\s*=", line):
            yield number, line, ""
        if not line or line.lstrip().startswith("#"):
            continue
        first = first or number
        joined += line.removesuffix("\\")
        if not line.endswith("\\"):
            name, *rest = joined.split(None, 1)
            yield first, name.upper(), "".join(rest)
            first, joined = 0, ""
    if first:
        raise Refusal(f":{first}: the last instruction ends in \\")


def expanded(word, variables):
    """A word with $NAME and ${NAME} replaced; one without a value is empty."""
    if re.search(rf"\$(?!{NAME}|\{{{NAME}\}})", word):
        raise Refusal(f"'{word}' is not expanded here, wanted $NAME or ${{NAME}}")
    return re.sub(rf"\$\{{?({NAME})\}}?", lambda found: variables.get(found[1], ""), word)


def words_of(rest, variables):
    if "$" in rest and ("'" in rest or "\\" in rest):
        raise Refusal(f"'{rest}' has $ beside quotes, which is not read here")
    try:
        return [expanded(word, variables) for word in shlex.split(rest)]
    except ValueError as error:
        raise Refusal(f"'{rest}' is not read here: {error}") from None


def one_word(rest, variables):
    words = words_of(rest, variables)
    if len(words) != 1:
        raise Refusal(f"'{rest}' is {len(words)} words, wanted one")
    return words[0]


def settings(rest, variables):
    """NAME=VALUE of an ENV."""
    found = [word.partition("=") for word in words_of(rest, variables)]
    if not all(equal and re.fullmatch(NAME, name) for name, equal, _ in found):
        raise Refusal(f"'{rest}' is not read here, wanted NAME=VALUE")
    return {name: value for name, _, value in found}


class Reader:
    """Reads one Dockerfile. `given` are build arguments."""

    def __init__(self, given):
        self.given = given
        self.asked = set()
        self.defaults = {}
        self.stages = {}
        self.stage = None

    def read_arg(self, rest):
        """Returns the value of the argument, which is also kept; None if it has none."""
        name, equal, default = rest.partition("=")
        if not re.fullmatch(NAME, name):
            raise Refusal(f"'{rest}' is not read here, wanted NAME or NAME=VALUE")
        self.asked.add(name)
        known = self.defaults if self.stage is None else self.stage.arguments
        visible = known if self.stage is None else {**known, **self.stage.variables}
        value = self.given.get(name, one_word(default, visible) if equal and default else "" if equal else self.defaults.get(name))
        if value is not None:
            known[name] = value

    def begin(self, rest):
        words = words_of(rest, self.defaults)
        if len(words) not in (1, 3) or words[0].startswith("-") or len(words) == 3 and words[1].upper() != "AS":
            raise Refusal(f"'{rest}' is not carried out here, wanted IMAGE or IMAGE AS NAME")
        base = self.stages.get(words[0])
        if base is None and words[0] != "base":
            raise Refusal(f"'{words[0]}' is not there, wanted an earlier stage or base")
        name = words[2].lower() if len(words) == 3 else str(len(self.stages))
        if not re.fullmatch(r"[a-z0-9][\w.-]*", name) or name == "base" or name in self.stages:
            raise Refusal(f"'{name}' is no name for a stage, wanted a new one")
        self.stage = dataclasses.replace(base or Stage(""), name=name, variables=dict(base.variables if base else {}), arguments={})
        self.stages[name] = self.stage
        return ["stage", name, words[0]]

    def copy(self, rest):
        words, source = words_of(rest, {**self.stage.arguments, **self.stage.variables}), ""
        if words and words[0].startswith("--from="):
            source = words.pop(0).removeprefix("--from=")
            if source not in self.stages or source == self.stage.name:
                raise Refusal(f"--from={source} is not there, wanted an earlier stage")
        if len(words) < 2 or words[0].startswith(("-", "[")) or "<<" in rest:
            raise Refusal(f"'{rest}' is not carried out here, wanted [--from=STAGE] SOURCE... DESTINATION")
        *patterns, to = words
        ending = "/" if to.endswith(("/", "/.")) or to == "." else ""
        whole = posixpath.normpath(posixpath.join(self.stage.folder, to))
        if len(patterns) > 1 and not ending:
            raise Refusal(f"'{rest}' is not carried out here: several sources want a destination that ends in /")
        return ["copy", self.stage.name, source, whole.rstrip("/") + ending, *patterns]

    def run(self, rest):
        if not rest or rest.startswith(("-", "[")) or re.search(r"<<-?\s*[\"']?\w", rest):
            raise Refusal(f"'{rest}' is not carried out here, wanted a command for the shell, on its own lines")
        variables = {**self.stage.arguments, **self.stage.variables}
        return ["run", self.stage.name, self.stage.user, self.stage.folder, rest, *(f"{name}={value}" for name, value in variables.items())]

    def set_entrypoint(self, rest):
        try:
            words = json.loads(rest)
        except ValueError:
            words = None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise Refusal(f"'{rest}' is not carried out here, wanted [\"PROGRAM\", ...]")
        self.stage.entrypoint = tuple(words)

    def step(self, name, rest):
        """Returns the step of an instruction, None if it has none."""
        if name not in KNOWN:
            raise Refusal(f"is not carried out here, wanted one of {', '.join(KNOWN)}")
        if name == "ARG":
            return self.read_arg(rest)
        if name == "FROM":
            return self.begin(rest)
        if self.stage is None:
            raise Refusal("stands before FROM")
        if name in ("COPY", "RUN"):
            return self.copy(rest) if name == "COPY" else self.run(rest)
        variables = {**self.stage.arguments, **self.stage.variables}
        if name == "ENV":
            self.stage.variables.update(settings(rest, variables))
        elif name == "USER":
            self.stage.user = one_word(rest, variables)
            if not re.fullmatch(r"[a-z_][\w-]*", self.stage.user):
                raise Refusal(f"'{self.stage.user}' is not carried out here, wanted the name of a user")
        elif name == "WORKDIR":
            self.stage.folder = posixpath.normpath(posixpath.join(self.stage.folder, one_word(rest, variables)))
            return ["folder", self.stage.name, self.stage.folder]
        else:
            self.set_entrypoint(rest)
        return None


def image_of(stage):
    return ["image", stage.name, f"[{' '.join(stage.entrypoint)}]", stage.user, stage.folder, *(f"{name}={value}" for name, value in stage.variables.items())]


def steps(text, given):
    """The steps of the text of a Dockerfile, each a list of words."""
    reader, found = Reader(given), []
    for line, name, rest in instructions(text):
        before = reader.stage
        try:
            step = reader.step(name, rest)
        except Refusal as refusal:
            raise Refusal(f":{line}: {name} {refusal}") from None
        if before is not None and reader.stage is not before:
            found.append(image_of(before))
        if step:
            found.append(step)
    if reader.stage is None:
        raise Refusal(": no FROM, wanted a stage")
    unasked = sorted(set(given) - reader.asked)
    if unasked:
        raise Refusal(f": no ARG {unasked[0]}, which is given")
    return [*found, image_of(reader.stage)]


def main():
    words = sys.argv[1:]
    if words in (["-h"], ["--help"]):
        print(__doc__, end="")
        return
    path = pathlib.Path(words[0] if words else "")
    try:
        if not words or not all("=" in word for word in words[1:]):
            raise Refusal(": wanted FILE [NAME=VALUE]... (see --help)")
        for step in steps(path.read_text(), dict(word.split("=", 1) for word in words[1:])):
            print(shlex.join(step))
    except OSError as error:
        print(f"{path}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except Refusal as refusal:
        print(f"{path.name or 'dockerfile_steps'}{refusal}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
