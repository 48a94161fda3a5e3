// SPDX-License-Identifier: Apache-2.0
// Lets a module that was compiled with glibc 2.38 or later run with glibc 2.34.
//
// Headers since 2.38 redirect strtol() and its like to functions that also read "0b1" in the bases
// 0 and 2. No caller in the module reads these bases. The module has the new functions itself,
// hidden and by the old ones, and so asks glibc for the old ones alone. A header of glibc would
// redirect the calls below, too; none is included.

extern "C" {
long plain_strtol(const char* text, char** end, int base) asm("strtol");
long long plain_strtoll(const char* text, char** end, int base) asm("strtoll");
unsigned long plain_strtoul(const char* text, char** end, int base) asm("strtoul");
unsigned long long plain_strtoull(const char* text, char** end, int base) asm("strtoull");

[[gnu::visibility("hidden")]] long __isoc23_strtol(const char* text, char** end, int base) {
  return plain_strtol(text, end, base);
}

[[gnu::visibility("hidden")]] long long __isoc23_strtoll(const char* text, char** end, int base) {
  return plain_strtoll(text, end, base);
}

[[gnu::visibility("hidden")]] unsigned long __isoc23_strtoul(const char* text, char** end,
                                                             int base) {
  return plain_strtoul(text, end, base);
}

[[gnu::visibility("hidden")]] unsigned long long __isoc23_strtoull(const char* text, char** end,
                                                                   int base) {
  return plain_strtoull(text, end, base);
}
}
