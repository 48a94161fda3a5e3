// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/traffic_picture.h"

#include <gtest/gtest.h>

#include <fstream>
#include <limits>

#include "tests/support/full_disk.h"
#include "tests/support/temp_folder.h"

namespace dynmo::observe {
namespace {

TrafficRow traffic_row(int from, int to, Purpose purpose, std::int64_t messages,
                       std::int64_t bytes) {
  return {WorldRank(from), WorldRank(to), purpose, {messages, Bytes{bytes}}};
}

// Ranks 0 and 2 share a node, and so do 1 and 3.
TrafficInterval traffic_example() {
  return {.generation = 3,
          .first_step = 10,
          .steps = 5,
          .ranks = {0, 1, 2, 3},
          .nodes = {0, 1, 0, 1},
          .measured = {traffic_row(0, 1, Purpose::kControl, 9, 99),
                       traffic_row(0, 2, Purpose::kActivation, 8, 1 << 20),
                       traffic_row(2, 0, Purpose::kGradient, 8, 1 << 20),
                       traffic_row(2, 1, Purpose::kActivation, 4, 1024)},
          .predicted = {traffic_row(0, 2, Purpose::kActivation, 8, 1 << 20),
                        traffic_row(2, 0, Purpose::kGradient, 8, 1 << 20),
                        traffic_row(2, 1, Purpose::kActivation, 4, 2048)}};
}

TEST(TrafficLog, ReadsBackWhatItHasWritten) {
  const TempFolder folder;
  const auto path = folder.path() / "traffic.jsonl";
  TrafficInterval second = traffic_example();
  second.ranks = {0, 1, 2, 4};
  second.nodes = {1, 1, 0, 1};
  ASSERT_TRUE(append_traffic(path, traffic_example()).has_value());
  ASSERT_TRUE(append_traffic(path, second).has_value());
  std::ofstream(path, std::ios::app) << R"({"format": "dynmo-traf)";
  const auto read = read_traffic(path);
  ASSERT_TRUE(read.has_value()) << read.error().message;
  EXPECT_EQ(*read, (std::vector{traffic_example(), second}));
  const TrafficInterval sum = sum_of(*read);
  EXPECT_EQ(sum.steps, 10);
  EXPECT_EQ(sum.ranks, (std::vector{0, 1, 2, 3, 4}));
  EXPECT_EQ(sum.nodes, (std::vector{1, 1, 0, 1, 1}));
  EXPECT_EQ(sum.measured[0].count, (MessageCount{18, Bytes{198}}));
}

TEST(TrafficLog, GoesOnBehindHalfALineAndAfterAFullDisk) {
  const TempFolder folder;
  const auto path = folder.write("traffic.jsonl", R"({"format": "dynmo-traf)");
  ASSERT_TRUE(append_traffic(path, traffic_example()));
  {
    const FullDisk full(std::filesystem::file_size(path) + 20);
    const auto failed = append_traffic(path, traffic_example());
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().message, "cannot write '" + path.string() + "': File too large");
  }
  ASSERT_TRUE(append_traffic(path, traffic_example()));
  const auto read = read_traffic(path);
  ASSERT_TRUE(read.has_value()) << read.error().message;
  EXPECT_EQ(*read, (std::vector{traffic_example(), traffic_example()}));
}

TEST(TrafficLog, IsATensorOfBytes) {
  const tensor::SparseTensor tensor = tensor_of({traffic_example(), traffic_example()});
  EXPECT_EQ(tensor.sizes, (std::vector<std::uint64_t>{2, 4, 4}));
  EXPECT_EQ(tensor.indices[1], (std::vector<std::uint32_t>{0, 2, 2, 0, 2, 2}));
  EXPECT_EQ(tensor.values, (std::vector<double>{1 << 20, 1 << 20, 1024, 1 << 20, 1 << 20, 1024}));
}

TEST(TrafficLog, SaysWhatIsWrong) {
  const auto error = [](const std::function<void(Json&)>& change) {
    Json json = to_json(traffic_example());
    change(json);
    const auto read = parse_traffic_interval(json, "t: line 1");
    return read ? "" : read.error().message;
  };
  EXPECT_EQ(error([](Json& json) { json["measured"][0]["purpose"] = "gossip"; }),
            "t: line 1: /measured/0/purpose purpose is 'gossip', wanted activation, gradient, "
            "reduction, migration or control");
  EXPECT_NE(
      error([](Json& json) { json["measured"][0]["from"] = -1; }).find("/measured/0/from is -1"),
      std::string::npos);
  EXPECT_EQ(error([](Json& json) { json["measured"][1]["to"] = 5; }),
            "t: line 1: /measured/1/to is 5, wanted one of the ranks of this line");
  EXPECT_NE(error([](Json& json) { json["steps"] = -1; }).find("/steps is -1"), std::string::npos);
  EXPECT_NE(error([](Json& json) { json["format"] = "dynmo-traffic-9"; }), "");
  EXPECT_EQ(error([](Json& json) { json["ranks"][3]["rank"] = 1; }),
            "t: line 1: /ranks/3/rank is 1, as of another rank of this line");
  EXPECT_EQ(error([](Json& json) { json["measured"][1]["bytes"] = std::int64_t{1} << 62; }),
            "t: line 1: /measured adds up to more than 2^62 messages and bytes");
}

TEST(TrafficLog, SumsOfItsLinesDoNotOverflow) {
  TrafficInterval large = traffic_example();
  large.measured.front().count.bytes = Bytes{std::int64_t{1} << 61};
  const std::string line = to_json(large).dump() + '\n';
  EXPECT_TRUE(parse_traffic(line, "t").has_value());
  EXPECT_EQ(parse_traffic(line + line, "t").error().message,
            "t: line 2: with the lines before it adds up to more than 2^62 messages, bytes and "
            "steps");
}

TEST(TrafficLog, TheLargestNumberOfARankIsAnIndex) {
  TrafficInterval far = traffic_example();
  far.ranks.back() = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(tensor_of({far}).sizes[1], std::uint64_t{1} << 31);
}

TEST(TrafficPicture, FramesNodesAndShadesByTheLogarithm) {
  EXPECT_EQ(traffic_text(traffic_example(), {.ascii = true}),
            "activation 1.0 MiB (predicted 1.0 MiB), gradient 1.0 MiB as predicted, control 99 B\n"
            "     from to: measured   to: predicted\n"
            "       0 |  ##|    | |  ##|    |\n"
            "       2 |##  |..  | |##  |..  |\n"
            "         +----+----+ +----+----+\n"
            "       1 |    |    | |    |    |\n"
            "       3 |    |    | |    |    |\n"
            "          . 1.0 KiB .. # 1.0 MiB, logarithmic; lines between nodes\n");
  EXPECT_EQ(traffic_text({}), "");
}

TEST(TrafficPicture, ADrawingHasACellForEveryPairAndAFrameForEveryNode) {
  const std::string svg = traffic_svg(traffic_example());
  const auto count = [&](std::string_view what) {
    int found = 0;
    for (std::size_t at = svg.find(what); at != std::string::npos; at = svg.find(what, at + 1)) {
      ++found;
    }
    return found;
  };
  EXPECT_EQ(count("<title>"), 2 * 16);
  EXPECT_EQ(count("stroke=\"#c00000\""), 2 * 2);
  EXPECT_EQ(count("<title>2 to 1: 1024 bytes</title>"), 1);
  EXPECT_EQ(count("<title>2 to 1: 2048 bytes</title>"), 1);
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
}

TEST(TrafficPicture, ATableHasALineForEveryPairAndPurpose) {
  const std::vector<TrafficInterval> intervals = {traffic_example()};
  EXPECT_EQ(traffic_csv(intervals),
            "generation,first_step,steps,from,to,purpose,measured_messages,measured_bytes,"
            "predicted_messages,predicted_bytes\n"
            "3,10,5,0,1,control,9,99,0,0\n"
            "3,10,5,0,2,activation,8,1048576,8,1048576\n"
            "3,10,5,2,0,gradient,8,1048576,8,1048576\n"
            "3,10,5,2,1,activation,4,1024,4,2048\n");
}

}  // namespace
}  // namespace dynmo::observe
