#include <cstdio>
#include <exception>

#include "args.h"
#include "train.h"

int main(int argc, char **argv) {
  constexpr int kFailure = 1;
  constexpr int kUsage = 2;
  constexpr int kInterrupted = 130;  // as shells have it: 128 + SIGINT
  try {
    const llm::Args args = llm::parse_args(argc, argv);
    if (args.help) {
      std::fputs(llm::usage().c_str(), stdout);
      return 0;
    }
    return llm::train(args) == llm::Outcome::kDone ? 0 : kInterrupted;
  } catch (const llm::UsageError &error) {
    std::fprintf(stderr, "trainer: %s\n\n%s", error.what(), llm::usage().c_str());
    return kUsage;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "trainer: %s\n", error.what());
    return kFailure;
  }
}
