// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stands in for Gloo's own header, see gloo/algorithm.h. Empty: nothing of it is named.
