// The least of a test framework: checks that print what they saw, and a count as the exit status.
#pragma once

#include <cmath>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

namespace check {

inline int &failures() {
  static int count = 0;
  return count;
}

template <typename T>
void print(std::ostream &out, const T &value) {
  out << value;
}

template <typename T>
void print(std::ostream &out, const std::vector<T> &values) {
  out << '[';
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) out << ", ";
    print(out, values[i]);
  }
  out << ']';
}

inline void fail(const char *file, int line, const std::string &message) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, message.c_str());
  ++failures();
}

template <typename A, typename B>
void equal(const A &actual, const B &expected, const char *what, const char *file, int line) {
  if (actual == expected) return;
  std::ostringstream message;
  message << what << " is ";
  print(message, actual);
  message << ", not ";
  print(message, expected);
  fail(file, line, message.str());
}

// `call` must throw E with `part` in its message.
template <typename E, typename Call>
void throws(const Call &call, const std::string &part, const char *file, int line) {
  try {
    call();
  } catch (const E &error) {
    if (std::string(error.what()).find(part) == std::string::npos) {
      fail(file, line, "the message '" + std::string(error.what()) + "' lacks '" + part + "'");
    }
    return;
  }
  fail(file, line, "nothing was thrown, but an error with '" + part + "' was expected");
}

inline int result() {
  if (failures() > 0) std::fprintf(stderr, "%d checks failed\n", failures());
  return failures() == 0 ? 0 : 1;
}

}  // namespace check

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) check::fail(__FILE__, __LINE__, #condition " is false"); \
  } while (false)
#define CHECK_EQUAL(actual, expected) check::equal(actual, expected, #actual, __FILE__, __LINE__)
#define CHECK_THROWS(type, call, part) \
  check::throws<type>([&] { (void)(call); }, part, __FILE__, __LINE__)
