#include "meeting_file.h"

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

#include "check.h"
#include "error.h"

namespace llm {
namespace {

using std::chrono::milliseconds;

std::vector<unsloth_comm_id> some_ids(size_t count) {
  std::vector<unsloth_comm_id> ids(count);
  for (size_t i = 0; i < count; ++i) std::memset(ids[i].bytes, static_cast<int>(i + 1), 128);
  return ids;
}

void ids_come_as_they_were_written(const std::string &path) {
  const std::vector<unsloth_comm_id> ids = some_ids(3);
  std::thread writer([&] {
    std::this_thread::sleep_for(milliseconds(60));
    write_meeting(path, ids);
  });
  const std::vector<unsloth_comm_id> read = read_meeting(path, 3, milliseconds(20000));
  writer.join();
  CHECK_EQUAL(read.size(), ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    CHECK_EQUAL(std::memcmp(&read[i], &ids[i], sizeof ids[i]), 0);
  }
  CHECK_THROWS(Error, write_meeting(path, ids), "is there already");
  CHECK_THROWS(Error, read_meeting(path, 2, milliseconds(0)), "is not what rank 0");
  std::remove(path.c_str());
}

void what_is_no_meeting_is_refused(const std::string &path) {
  CHECK_THROWS(Error, read_meeting(path, 1, milliseconds(30)), "has not come");
  for (const std::string &text : {std::string(), std::string(144, 'x')}) {
    std::ofstream(path, std::ios::binary) << text;
    CHECK_THROWS(Error, read_meeting(path, 1, milliseconds(0)), "is not what rank 0");
  }
  std::remove(path.c_str());
  CHECK_THROWS(Error, write_meeting("no/such/folder/file", some_ids(1)), "no/such/folder/file");
}

}  // namespace
}  // namespace llm

int main() {
  const std::string path = "meeting_file_test.tmp";
  std::remove(path.c_str());
  llm::ids_come_as_they_were_written(path);
  llm::what_is_no_meeting_is_refused(path);
  return check::failures();
}
