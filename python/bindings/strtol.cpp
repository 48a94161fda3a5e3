// SPDX-License-Identifier: Apache-2.0
// Lets a module that was compiled with glibc 2.38 or later run with glibc 2.34.
//
// Headers since 2.38 redirect strtol() and similar functions to new ones, which also read "0b1" in
// the bases 0 and 2. No caller in the module uses these bases. So the module defines the new
// functions itself, hidden, by calling the old ones, and needs only the old ones of glibc. This
// file includes no header of glibc, because it would redirect the calls below, too.

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
