# SPDX-License-Identifier: Apache-2.0
"""An elastic run on a device, beside its undisturbed twin there."""
import os

from survival_case import SurvivalCase


class DeviceCase(SurvivalCase):
    """DYNMO_DEVICE is the name of the device, strict if it is not set. The twin sends through host memory."""

    STEPS = 200
    ENDLESS = ("train.steps=100000", "freezing.start=0.0001", "freezing.end=0.0006")
    KILLS_BEFORE = 30  # a step takes 5 ms, and the run must not end before the kill
    SETTINGS = (f"run.device={os.environ.get('DYNMO_DEVICE', 'strict')}", f"train.steps={STEPS}", "elastic.enabled=true",
                "checkpoint.every=25", "checkpoint.keep=1000", "freezing.enabled=true", "freezing.start=0.03", "freezing.end=0.2",
                "model.hidden=16", "model.blocks=2", "model.heads=2", "model.intermediate=24")

    def setUp(self):
        super().setUp()
        self.twin("twin", 2)
