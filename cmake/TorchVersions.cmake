# SPDX-License-Identifier: Apache-2.0
# The series of PyTorch that a build takes, from the oldest to the newest, and those of them that CI or a row of
# docs/versions.md has tested. The only place that lists them: cmake/FindLibTorch.cmake, scripts/setup, `dynmo` and, by dynmo._core, dynmo.torch read it.
set(DYNMO_TORCH_OLDEST 2.11)
set(DYNMO_TORCH_NEWEST 2.15)
set(DYNMO_TORCH_TESTED 2.11 2.15)
