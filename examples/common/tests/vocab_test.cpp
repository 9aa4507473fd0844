// Tokenizes the texts that llama.cpp ships beside its vocabularies (NAME.gguf.inp) and compares
// with the tokens it ships (NAME.gguf.out).
//
//   vocab_test FILE.gguf...
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "tokenizer.h"

namespace llm {
namespace {

std::string read_file(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

void compare(const std::string &path) {
  const Tokenizer tokenizer(Gguf::open(path));
  const std::string texts = read_file(path + ".inp");
  std::istringstream expected_lines(read_file(path + ".out"));
  const std::string separator = "\n__ggml_vocab_test__\n";
  int cases = 0;
  for (size_t at = 0; at < texts.size(); ++cases) {
    const size_t end = std::min(texts.find(separator, at), texts.size());
    std::string line;
    CHECK(static_cast<bool>(std::getline(expected_lines, line)));
    std::istringstream numbers(line);
    const std::vector<TokenId> expected{std::istream_iterator<TokenId>(numbers), {}};
    CHECK_EQUAL(tokenizer.encode(texts.substr(at, end - at), {false, false}), expected);
    at = end + separator.size();
  }
  CHECK(cases > 0);
  std::printf("%s: %d texts\n", path.c_str(), cases);
}

}  // namespace
}  // namespace llm

int main(int argc, char **argv) {
  for (int i = 1; i < argc; ++i) llm::compare(argv[i]);
  return check::result();
}
