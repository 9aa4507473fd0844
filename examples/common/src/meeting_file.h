// The file by which ranks that are processes find each other: the first one writes ids of groups,
// the others wait for it.
#pragma once

#include <chrono>
#include <string>
#include <unsloth.hpp>
#include <vector>

namespace llm {

// Writes the file as a whole. Throws where there is one: it would be of another run, whose ids
// these processes may have read already.
void write_meeting(const std::string &path, const std::vector<unsloth_comm_id> &ids);

// Waits for the file and reads what has to be so many ids.
std::vector<unsloth_comm_id> read_meeting(const std::string &path, size_t count,
                                          std::chrono::milliseconds patience);

}  // namespace llm
