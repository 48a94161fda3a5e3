// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/table.h"

#include <gtest/gtest.h>

#include "dynmo/core/check.h"

namespace dynmo::observe {
namespace {

TEST(FormatCount, TakesAnSButForOne) {
  EXPECT_EQ(format_count(0, "rank"), "0 ranks");
  EXPECT_EQ(format_count(1, "rank"), "1 rank");
  EXPECT_EQ(format_count(2, "layer"), "2 layers");
}

TEST(Table, AlignsColumnsAndCutsTrailingBlanks) {
  const std::vector<Column> columns = {
      {.title = "rank"}, {.title = "name", .align = Column::Align::kLeft}, {.title = "s"}};
  const std::vector<std::vector<std::string>> rows = {{"0", "a–b", "1.5"}, {"10", "", ""}};
  EXPECT_EQ(table(columns, rows),
            "  rank  name    s\n"
            "     0  a–b   1.5\n"
            "    10\n");
  EXPECT_EQ(table(columns, {}, 0), "rank  name  s\n");
}

TEST(Table, WantsAWordForEachColumn) {
  const std::vector<Column> columns = {{.title = "rank"}};
  const std::vector<std::vector<std::string>> rows = {{"0", "1"}};
  EXPECT_THROW((void)table(columns, rows), CheckFailure);
}

}  // namespace
}  // namespace dynmo::observe
