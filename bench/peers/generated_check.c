// SPDX-License-Identifier: Apache-2.0
// Reads a coordinates file whose entries ascend and prints what it has as JSON, for
// tensor_compare.py. Entries that ascend strictly come once each.
//
//     cc -O2 -o generated_check generated_check.c && ./generated_check FILE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kMaxModes = 16, kBuffer = 1 << 22 };

struct Moments {
  uint64_t nonempty, sum, max;
  unsigned __int128 squares;
  uint64_t open;  // length of the run that has not ended
};

static void end_run(struct Moments* of) {
  if (of->open == 0) return;
  of->nonempty += 1;
  of->sum += of->open;
  of->squares += (unsigned __int128)of->open * of->open;
  if (of->open > of->max) of->max = of->open;
  of->open = 0;
}

static char buffer[kBuffer];
static size_t at, filled;

static int next(FILE* file) {
  if (at == filled) {
    filled = fread(buffer, 1, kBuffer, file);
    at = 0;
    if (filled == 0) return EOF;
  }
  return (unsigned char)buffer[at++];
}

static void fail(const char* what, uint64_t entry) {
  fprintf(stderr, "entry %llu: %s\n", (unsigned long long)entry, what);
  exit(1);
}

// A whole number and the character behind it.
static uint64_t number(FILE* file, int* behind, uint64_t entry) {
  uint64_t value = 0;
  int c = next(file);
  if (c < '0' || c > '9') fail("no whole number", entry);
  for (; c >= '0' && c <= '9'; c = next(file)) value = 10 * value + (uint64_t)(c - '0');
  *behind = c;
  return value;
}

static void print(const char* name, const struct Moments* of) {
  if (of->squares >> 63) fail("the sum of squares has more than 63 bits", of->sum);
  printf("\"%s\": {\"nonempty\": %llu, \"sum\": %llu, \"max\": %llu, \"squares\": %llu}", name,
         (unsigned long long)of->nonempty, (unsigned long long)of->sum, (unsigned long long)of->max,
         (unsigned long long)of->squares);
}

int main(int argc, char** argv) {
  FILE* file = argc == 2 ? fopen(argv[1], "rb") : NULL;
  if (file == NULL) {
    fprintf(stderr, "generated_check FILE\n");
    return 2;
  }
  int behind;
  const uint64_t order = number(file, &behind, 0);
  if (order < 2 || order > kMaxModes || behind != '\n') fail("no number of modes", 0);
  uint64_t sizes[kMaxModes], index[kMaxModes], before[kMaxModes] = {0};
  for (uint64_t m = 0; m < order; ++m) sizes[m] = number(file, &behind, 0);
  if (behind != '\n') fail("not as many sizes as modes", 0);
  struct Moments fiber = {0}, slice = {0};
  uint64_t entries = 0;
  for (;; ++entries) {
    const int c = next(file);
    if (c == EOF) break;
    --at;
    for (uint64_t m = 0; m < order; ++m) {
      index[m] = number(file, &behind, entries);
      if (index[m] < 1 || index[m] > sizes[m]) fail("an index is out of range", entries);
      if (behind != ' ') fail("not as many indices as modes", entries);
    }
    int digit = next(file);
    while (digit != '\n' && digit != EOF) digit = next(file);
    if (digit == EOF) fail("the line has no end", entries);
    uint64_t first = 0;  // the first mode that differs from the entry before
    while (first < order && index[first] == before[first]) ++first;
    if (first == order || index[first] < before[first]) {
      fail("it does not come behind the one before it", entries);
    }
    if (first + 1 < order) {
      end_run(&fiber);
      if (first + 2 < order) end_run(&slice);
      ++slice.open;
    }
    ++fiber.open;
    memcpy(before, index, sizeof(index[0]) * order);
  }
  end_run(&fiber);
  end_run(&slice);
  printf("{\"sizes\": [");
  for (uint64_t m = 0; m < order; ++m) {
    printf("%s%llu", m == 0 ? "" : ", ", (unsigned long long)sizes[m]);
  }
  printf("], \"entries\": %llu, ", (unsigned long long)entries);
  print("fiber", &fiber);
  printf(", ");
  print("slice", &slice);
  printf("}\n");
  return 0;
}
