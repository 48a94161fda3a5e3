// SPDX-License-Identifier: Apache-2.0
#pragma once

// at::parallel_for for our own loops. Without OpenMP it silently becomes a loop on one thread. So
// CMakeLists.txt names the files that include this header, and g++ refuses other files here.

#include <ATen/Parallel.h>

#if defined(__GNUC__) && !defined(__clang__) && !defined(_OPENMP)
#error "one thread only: make this file one of dynmo_parallel in CMakeLists.txt"
#endif
