#include "meeting_file.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "error.h"
#include "output_file.h"

namespace llm {
namespace {

// What the file begins with.
constexpr char kMark[] = "unsloth ranks 1\n";
constexpr size_t kMarkBytes = sizeof kMark - 1;

}  // namespace

void write_meeting(const std::string &path, const std::vector<unsloth_comm_id> &ids) {
  if (std::filesystem::exists(path)) {
    throw Error(path + ": is there already: remove it if no other run uses it");
  }
  OutputFile file(path);
  file.write(kMark, kMarkBytes);
  file.write(ids.data(), ids.size() * sizeof ids[0]);
  file.commit();
}

std::vector<unsloth_comm_id> read_meeting(const std::string &path, size_t count,
                                          std::chrono::milliseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (!std::filesystem::exists(path)) {
    if (std::chrono::steady_clock::now() >= end) {
      throw Error(path + ": has not come: is the process of rank 0 running?");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  std::ifstream file(path, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  std::vector<unsloth_comm_id> ids(count);
  if (!file || text.size() != kMarkBytes + count * sizeof ids[0] ||
      text.compare(0, kMarkBytes, kMark) != 0) {
    throw Error(path + ": is not what rank 0 of as many ranks writes");
  }
  std::memcpy(ids.data(), text.data() + kMarkBytes, count * sizeof ids[0]);
  return ids;
}

}  // namespace llm
