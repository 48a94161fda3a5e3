// SPDX-License-Identifier: Apache-2.0
// Points of a rank inside of what no message and no source tells of: the linker puts these
// functions in the place of the product's (tests/train/CMakeLists.txt), which they call.
#include <filesystem>
#include <functional>

#include "dynmo/checkpoint/background_writer.h"
#include "dynmo/model/adamw.h"
#include "tests/train/survival_points.h"

using dynmo::Expected;
using dynmo::checkpoint::BackgroundWriter;
using dynmo::checkpoint::LayerFile;
using dynmo::model::AdamWOptions;
using dynmo::model::LayerState;
using dynmo::train::testing::pass_inside;

// NOLINTBEGIN(bugprone-reserved-identifier): the linker's names
extern "C" {

void __real__ZN5dynmo5model6updateERNS0_10LayerStateERKNS0_12AdamWOptionsEd(LayerState& state,
                                                                            const AdamWOptions&,
                                                                            double factor);
void __wrap__ZN5dynmo5model6updateERNS0_10LayerStateERKNS0_12AdamWOptionsEd(
    LayerState& state, const AdamWOptions& options, double factor) {
  pass_inside("update of a layer");
  __real__ZN5dynmo5model6updateERNS0_10LayerStateERKNS0_12AdamWOptionsEd(state, options, factor);
}

void __real__ZN5dynmo10checkpoint16BackgroundWriter9add_layerERKNSt10filesystem7__cxx114pathERKNS0_9LayerFileE(
    BackgroundWriter* writer, const std::filesystem::path& pending, const LayerFile& layer);
// Before what was added of others is written, and after it.
void __wrap__ZN5dynmo10checkpoint16BackgroundWriter9add_layerERKNSt10filesystem7__cxx114pathERKNS0_9LayerFileE(
    BackgroundWriter* writer, const std::filesystem::path& pending, const LayerFile& layer) {
  pass_inside("layer to the disk");
  __real__ZN5dynmo10checkpoint16BackgroundWriter9add_layerERKNSt10filesystem7__cxx114pathERKNS0_9LayerFileE(
      writer, pending, layer);
  if (dynmo::train::testing::Watcher::current == nullptr) return;
  writer->wait();
  pass_inside("layer on the disk");
}

void __real__ZN5dynmo10checkpoint16BackgroundWriter8add_taskESt8functionIFNS_8ExpectedIvEEvEE(
    BackgroundWriter* writer, std::function<Expected<void>()> task);
void __wrap__ZN5dynmo10checkpoint16BackgroundWriter8add_taskESt8functionIFNS_8ExpectedIvEEvEE(
    BackgroundWriter* writer, std::function<Expected<void>()> task) {
  pass_inside("commit of a checkpoint");
  __real__ZN5dynmo10checkpoint16BackgroundWriter8add_taskESt8functionIFNS_8ExpectedIvEEvEE(
      writer, std::move(task));
  if (dynmo::train::testing::Watcher::current == nullptr) return;
  writer->wait();
  pass_inside("checkpoint committed");
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier)
