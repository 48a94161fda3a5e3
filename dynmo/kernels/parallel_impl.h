// SPDX-License-Identifier: Apache-2.0
#pragma once

// at::parallel_for for our own loops. Compiled without OpenMP it is a loop on one thread, and says
// nothing: CMakeLists.txt names the files that include this, and here g++ refuses others.

#include <ATen/Parallel.h>

#if defined(__GNUC__) && !defined(__clang__) && !defined(_OPENMP)
#error "one thread only: give this file -fopenmp in CMakeLists.txt"
#endif
