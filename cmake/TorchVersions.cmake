# SPDX-License-Identifier: Apache-2.0
# The series of PyTorch that DynMo is tested with, from the oldest to the newest (docs/versions.md). A build takes these and those between.
# The only place that lists them: cmake/FindLibTorch.cmake, scripts/setup, `dynmo` and, by dynmo._core, dynmo.torch read it.
set(DYNMO_TORCH_TESTED 2.11 2.15)
list(GET DYNMO_TORCH_TESTED 0 DYNMO_TORCH_OLDEST)
list(GET DYNMO_TORCH_TESTED -1 DYNMO_TORCH_NEWEST)
