// A block of a kernel's threads on the host. Each is a fiber, and runs until it must wait for
// others; then another of the block runs, on the same thread of the process. Blocks run side by
// side; those of a cluster by turns, on one thread of the process.
//
// What is undefined on a GPU ends the program here, with a word about where: threads that wait for
// what never comes, threads of a warp that do not call the same operation, an address of nothing.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace machine {

constexpr unsigned kWarp = 32;
constexpr size_t kStack = 256 << 10;

struct Dim {
  unsigned x, y, z;
  unsigned count() const { return x * y * z; }
};

// A launch, as the driver hands it to each of the process's threads that run blocks of it.
struct Launch {
  const char *kernel;
  Dim grid, block;
  size_t shared_bytes;
  void **params;
  // The order in which warps run is drawn from it.
  uint64_t seed;
  // Copies into shared memory happen as soon as they may, not as late as they may.
  bool early_copies;
  unsigned cluster;  // blocks of one
  std::atomic<uint64_t> next_block;
};

struct Copy {
  void *to;
  const void *from;
  unsigned bytes, filled;
};

// A product of Hopper's warpgroups that is begun: `run` computes a warp's part of it.
struct Thread;
struct Product {
  void (*run)(Thread *const *lanes, size_t index);
  float *d;
  const uint32_t *a;
  uint64_t a_tile, b_tile;
  int accumulate;
  uint32_t group;
};

// A copy that its thread has not waited for.
struct Late {
  void *to;
  const void *from;
  uint32_t group;
};

struct Thread {
  void *stack_pointer;
  Dim index;
  unsigned rank;
  bool done;
  // It waits while the word, under the mask, is this value. No word: it can run.
  const volatile uint32_t *word;
  uint32_t mask, value;
  // Copies that are begun and that no barrier was told of.
  std::vector<Copy> copies;
  std::vector<Product> products;
  uint32_t groups;     // of products, that are closed
  unsigned registers;  // that it has
  uint32_t cluster;    // how often its cluster's blocks had come together when it came
  // Copies of 16 bytes that it has begun, and the groups that are closed.
  std::vector<Late> late;
  uint32_t late_groups;
  // Copies out of shared memory that the engine has not made yet, in groups; the last is open.
  std::vector<std::vector<std::function<void()>>> stores;
};

// Operations that a warp's threads do together: the last to come computes what all get.
struct Warp {
  struct Round {
    alignas(16) char given[kWarp * 64];
    alignas(16) char taken[kWarp * 32];
    void (*compute)(Round &);
  };
  uint32_t completed;
  unsigned arrived, alive;
  // A thread may begin the next operation before others have read the results of this one.
  Round rounds[2];

  void complete() {
    Round &round = rounds[completed & 1];
    round.compute(round);
    arrived = 0;
    completed++;
  }
};

// A barrier in shared memory, of eight bytes: a phase ends when what is expected has arrived,
// threads and bytes.
struct Barrier {
  uint32_t phase : 1, expected : 12, pending : 12;
  int32_t bytes;
};

// A tensor as the copy engine knows it: rows of boxes of 64 or 128 bytes are swizzled.
struct alignas(64) TensorMap {
  void *pointer;
  uint64_t strides[5];  // bytes; the first is an element's
  uint32_t sizes[5];    // less one
  uint16_t counts[5];
  uint16_t rank;
};
static_assert(sizeof(TensorMap) == 128, "what a launch has room for");

struct NamedBarrier {
  uint32_t completed;
  unsigned arrived;
};

class Block;

// Blocks that reach each other's shared memory. Each has a part of the addresses.
struct Cluster {
  static constexpr uint32_t kPart = 1 << 20;
  std::vector<std::unique_ptr<Block>> blocks;
  unsigned alive, arrived;
  uint32_t synced;

  explicit Cluster(Launch &launch);
  void run(uint64_t first, void (*body)());
  Block &of(uint32_t address) { return *blocks.at(address / kPart - 1); }
};

class Block {
 public:
  Block(Launch &launch, Cluster &cluster)
      : launch_(launch), cluster_(cluster), threads_(launch.block.count()) {
    warps_.reset(new Warp[(threads_.size() + kWarp - 1) / kWarp]);
    stacks_bytes_ = threads_.size() * kStack;
    const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    stacks_ = mmap(nullptr, stacks_bytes_, PROT_READ | PROT_WRITE, kind, -1, 0);
    if (stacks_ == MAP_FAILED) fail("no memory for stacks");
    // A page that is not there follows what the launch asked for.
    const size_t page = 4096;
    shared_bytes_ = (launch.shared_bytes + page - 1) / page * page;
    void *shared = mmap(nullptr, shared_bytes_ + page, PROT_READ | PROT_WRITE, kind, -1, 0);
    if (shared == MAP_FAILED) fail("no shared memory");
    mprotect(static_cast<char *>(shared) + shared_bytes_, page, PROT_NONE);
    shared_ = static_cast<char *>(shared);
  }
  Block(const Block &) = delete;
  ~Block() {
    munmap(stacks_, stacks_bytes_);
    munmap(shared_, shared_bytes_ + 4096);
  }

  // Begins a block, and runs each of its threads that can go on. Whether there was something to do.
  void start(uint64_t number, void (*body)());
  bool turn();

  // For the thread that runs.
  Thread &self() { return *self_; }
  Warp &warp() { return warps_[self_->rank / kWarp]; }
  // Aligned from its end, so that the first byte behind it is one that is not there.
  char *shared() { return shared_ + (shared_bytes_ - launch_.shared_bytes) / 128 * 128; }
  Dim index() const { return index_; }
  const Launch &launch() const { return launch_; }

  void wait_while(const volatile uint32_t *word, uint32_t mask, uint32_t value);

  Cluster &cluster() { return cluster_; }
  // Of all threads of the cluster.
  void arrive_at_cluster() {
    self_->cluster = cluster_.synced;
    if (++cluster_.arrived == cluster_.alive) {
      cluster_.arrived = 0;
      cluster_.synced++;
    }
  }
  void await_cluster() { wait_while(&cluster_.synced, ~0u, self_->cluster); }

  void sync() {
    if (++arrived_ == alive_) {
      arrived_ = 0;
      synced_++;
    } else {
      wait_while(&synced_, ~0u, synced_);
    }
  }

  void copy(const Copy &copy) {
    if (launch_.early_copies) {
      land(copy);
    } else {
      self_->copies.push_back(copy);
    }
  }
  void copies_arrive(Barrier &barrier) {
    auto &landing = landing_[&barrier];
    landing.insert(landing.end(), self_->copies.begin(), self_->copies.end());
    self_->copies.clear();
  }
  void arrive(Barrier &barrier) {
    if (barrier.pending == 0) fail("a barrier that was not initialised, or too many that arrive");
    barrier.pending--;
    end_phase(barrier);
  }
  void deliver(Barrier &barrier, uint32_t bytes) {
    barrier.bytes -= bytes;
    end_phase(barrier);
  }
  void wait(const Barrier &barrier, uint32_t parity) {
    wait_while(reinterpret_cast<const uint32_t *>(&barrier), 1, parity & 1);
  }

  // Barriers of a number, which count threads.
  void arrive(int id, unsigned threads) {
    NamedBarrier &barrier = named_.at(id);
    if (++barrier.arrived == threads) {
      barrier.arrived = 0;
      barrier.completed++;
    }
  }
  void sync(int id, unsigned threads) {
    const uint32_t before = named_.at(id).completed;
    arrive(id, threads);
    wait_while(&named_[id].completed, ~0u, before);
  }

  // A warp takes registers only once others have given as many back.
  void set_registers(unsigned count) {
    unsigned &mine = self_->registers;
    if (count <= mine) {
      spare_ += mine - count;
      handed_++;
    } else {
      while (spare_ < count - mine) wait_while(&handed_, ~0u, handed_);
      spare_ -= count - mine;
    }
    mine = count;
  }

  // What the copy engine does: now, or some time before it is waited for.
  void engine(std::function<void()> work) {
    if (launch_.early_copies) {
      work();
    } else {
      engine_.push_back(std::move(work));
    }
  }
  void store(std::function<void()> work) {
    if (launch_.early_copies) {
      work();
    } else {
      if (self_->stores.empty()) self_->stores.emplace_back();
      self_->stores.back().push_back(std::move(work));
    }
  }
  void commit_stores() {
    if (!self_->stores.empty()) self_->stores.emplace_back();
  }
  // Until at most the newest `pending` groups that are closed are to be made.
  void wait_stores(size_t pending) {
    auto &groups = self_->stores;
    const size_t closed = groups.empty() ? 0 : groups.size() - 1;
    for (size_t i = 0; i + pending < closed; ++i) {
      for (auto &work : groups.front()) work();
      groups.erase(groups.begin());
    }
    if (groups.size() == 1 && groups.front().empty()) groups.clear();
  }

  // Shared memory as PTX names it, by an offset.
  uint32_t shared_address(const void *pointer) const {
    return static_cast<const char *>(pointer) - shared_;
  }
  char *shared_pointer(uint32_t address) {
    if (address >= shared_bytes_) fail("an address behind shared memory");
    return shared_ + address;
  }

  [[noreturn]] void fail(const char *what) const;

 private:
  static void land(const Copy &copy) {
    memcpy(copy.to, copy.from, copy.filled);
    memset(static_cast<char *>(copy.to) + copy.filled, 0, copy.bytes - copy.filled);
  }
  void end_phase(Barrier &barrier) {
    if (barrier.pending > 0 || barrier.bytes > 0) return;
    auto landing = landing_.find(&barrier);
    if (landing != landing_.end()) {
      for (const Copy &copy : landing->second) land(copy);
      landing->second.clear();
    }
    barrier.pending = barrier.expected;
    barrier.phase ^= 1;
  }
  static void begin();
  void end();

  Launch &launch_;
  Cluster &cluster_;
  std::vector<Thread> threads_;
  std::unique_ptr<Warp[]> warps_;
  void *stacks_;
  char *shared_;
  size_t stacks_bytes_, shared_bytes_;
  Dim index_;
  Thread *self_ = nullptr;
  void *scheduler_ = nullptr;
  void (*body_)() = nullptr;
  unsigned alive_, arrived_;
  uint32_t synced_;
  uint64_t random_;
  unsigned spare_;   // registers that were given back
  uint32_t handed_;  // how often
  std::unordered_map<const void *, std::vector<Copy>> landing_;
  std::array<NamedBarrier, 16> named_;
  std::deque<std::function<void()>> engine_;
};

inline thread_local Block *block = nullptr;

// Keeps the registers that a call must keep on the stack that it leaves, and takes them from the
// other.
extern "C" void machine_switch(void **left, void *entered);
asm(R"(
.text
.local machine_switch
machine_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

inline void Block::fail(const char *what) const {
  std::fprintf(stderr, "emulator: %s, block %u %u %u of %u %u %u", launch_.kernel, index_.x,
               index_.y, index_.z, launch_.grid.x, launch_.grid.y, launch_.grid.z);
  if (self_ != nullptr) std::fprintf(stderr, ", thread %u", self_->rank);
  std::fprintf(stderr, ": %s\n", what);
  std::abort();
}

inline void Block::wait_while(const volatile uint32_t *word, uint32_t mask, uint32_t value) {
  while ((*word & mask) == value) {
    self_->word = word;
    self_->mask = mask;
    self_->value = value;
    machine_switch(&self_->stack_pointer, scheduler_);
  }
}

inline void Block::begin() {
  block->body_();
  block->end();
}

// Whoever waits for a thread that is over waits for the others alone.
inline void Block::end() {
  if (!self_->copies.empty()) fail("a copy into shared memory that nobody waits for");
  if (!self_->stores.empty()) fail("a copy out of shared memory that nobody waits for");
  if (!self_->products.empty()) fail("a product that nobody waits for");
  self_->done = true;
  if (--alive_ > 0 && arrived_ == alive_) {
    arrived_ = 0;
    synced_++;
  }
  if (--cluster_.alive > 0 && cluster_.arrived == cluster_.alive) {
    cluster_.arrived = 0;
    cluster_.synced++;
  }
  Warp &warp = this->warp();
  if (--warp.alive > 0 && warp.arrived == warp.alive) warp.complete();
  machine_switch(&self_->stack_pointer, scheduler_);
}

inline void Block::start(uint64_t number, void (*body)()) {
  body_ = body;
  index_ = {unsigned(number % launch_.grid.x), unsigned(number / launch_.grid.x % launch_.grid.y),
            unsigned(number / launch_.grid.x / launch_.grid.y)};
  alive_ = threads_.size();
  arrived_ = synced_ = 0;
  spare_ = handed_ = 0;
  // What a launch has at most: an even share, in eights.
  const unsigned registers = std::min<size_t>(65536 / threads_.size() / 8 * 8, 255);
  landing_.clear();
  named_ = {};
  // Not a number in any type.
  memset(shared_, 0xff, shared_bytes_);
  const unsigned warps = (threads_.size() + kWarp - 1) / kWarp;
  for (unsigned i = 0; i < threads_.size(); i++) {
    const Dim &size = launch_.block;
    Thread &thread = threads_[i];
    thread = Thread{};
    thread.rank = i;
    thread.registers = registers;
    thread.index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    // As after a call of `begin`, whose frame is aligned.
    void **top = reinterpret_cast<void **>(static_cast<char *>(stacks_) + (i + 1) * kStack) - 1;
    *--top = reinterpret_cast<void *>(&Block::begin);
    thread.stack_pointer = top - 6;
  }
  for (unsigned i = 0; i < warps; i++) {
    warps_[i].completed = warps_[i].arrived = 0;
    warps_[i].alive = std::min<size_t>(kWarp, threads_.size() - i * kWarp);
  }
  random_ = launch_.seed + number;
}

inline bool Block::turn() {
  block = this;
  const unsigned warps = (threads_.size() + kWarp - 1) / kWarp;
  random_ = random_ * 6364136223846793005 + 1442695040888963407;
  const unsigned first = (random_ >> 33) % warps;
  bool ran = false;
  for (unsigned i = 0; i < warps * kWarp; i++) {
    const unsigned rank = (first * kWarp + i) % (warps * kWarp);
    if (rank >= threads_.size()) continue;
    self_ = &threads_[rank];
    if (self_->done || (self_->word != nullptr && (*self_->word & self_->mask) == self_->value)) {
      continue;
    }
    self_->word = nullptr;
    ran = true;
    machine_switch(&scheduler_, self_->stack_pointer);
  }
  self_ = nullptr;
  if (!engine_.empty() && (!ran || random_ >> 62 == 0)) {
    engine_.front()();
    engine_.pop_front();
    ran = true;
  }
  return ran;
}

inline Cluster::Cluster(Launch &launch) {
  for (unsigned i = 0; i < launch.cluster; i++) {
    blocks.push_back(std::make_unique<Block>(launch, *this));
  }
}

inline void Cluster::run(uint64_t first, void (*body)()) {
  arrived = synced = 0;
  alive = blocks.size() * blocks[0]->launch().block.count();
  for (size_t i = 0; i < blocks.size(); i++) blocks[i]->start(first + i, body);
  while (alive > 0) {
    bool ran = false;
    for (auto &of : blocks) ran = of->turn() || ran;
    if (!ran) block->fail("all threads that are left wait for what does not come");
  }
}

// Calls `compute(given, taken)` with what each thread of the warp gave, once all have.
template <class Given, class Taken, void (*compute)(const Given *, Taken *)>
Taken together(const Given &given) {
  static_assert(sizeof(Given) <= 64 && sizeof(Taken) <= 32, "a round has room for it");
  Warp &warp = block->warp();
  const uint32_t number = warp.completed;
  Warp::Round &round = warp.rounds[number & 1];
  const auto all = +[](Warp::Round &round) {
    compute(reinterpret_cast<const Given *>(round.given), reinterpret_cast<Taken *>(round.taken));
  };
  if (warp.arrived == 0) {
    memset(round.given, 0, sizeof(round.given));
    round.compute = all;
  } else if (round.compute != all) {
    block->fail("threads of a warp that do not do the same together");
  }
  const unsigned lane = block->self().rank % kWarp;
  memcpy(round.given + lane * sizeof(Given), &given, sizeof(Given));
  if (++warp.arrived == warp.alive) {
    warp.complete();
  } else {
    block->wait_while(&warp.completed, ~0u, number);
  }
  Taken taken;
  memcpy(&taken, round.taken + lane * sizeof(Taken), sizeof(Taken));
  return taken;
}

// A kernel as the driver calls it.
struct Entry {
  size_t count;
  const size_t *sizes;
  void (*run)(Launch &);
  unsigned cluster = 1;  // blocks of one
};

// Of what stands beside a kernel for the host, if it says so.
template <class Choices>
unsigned cluster_of(const Choices &choices) {
  if constexpr (requires { choices.blocks; }) return choices.blocks;
  return 1;
}

template <auto kernel>
struct Kernel;
template <class... A, void (*kernel)(A...)>
struct Kernel<kernel> {
  template <size_t... I>
  static void call(void **params, std::index_sequence<I...>) {
    kernel(*static_cast<A *>(params[I])...);
  }
  static void body() { call(block->launch().params, std::index_sequence_for<A...>()); }
  static void run(Launch &launch) {
    Cluster here(launch);
    const uint64_t blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
    const unsigned each = launch.cluster;
    for (uint64_t i; (i = launch.next_block.fetch_add(each)) < blocks;) here.run(i, body);
    block = nullptr;
  }
  static constexpr size_t sizes[] = {sizeof(A)...};
  static constexpr Entry entry = {sizeof...(A), sizes, run};
  static Entry of_cluster(unsigned cluster) { return {sizeof...(A), sizes, run, cluster}; }
};

}  // namespace machine
