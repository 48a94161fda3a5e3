// SPDX-License-Identifier: Apache-2.0
#pragma once

// One of five headers that stand in for Gloo's own, which PyTorch's wheel does not ship though
// c10d's ProcessGroupGloo.hpp includes them. That header only names these types; everything behind
// them is inside libtorch. Seen by c10d_transport.cpp alone. Empty: nothing of it is named.
