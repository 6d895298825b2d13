// The simulated accelerator `sim`: devices, streams, events and an allocator for torch, without hardware.
//
// torch reserves the device type PrivateUse1 for devices that are added from outside. This file fills it: the parts
// below are the ones that torch asks a device for, in the order in which they build on each other. `__init__.py`
// compiles and loads the file, `module.py` is the Python module `torch.sim`.
//
// Why streams hold their work back
// --------------------------------
// Code for an accelerator is wrong where it relies on an order that nobody asked for. On hardware such code is often
// right by luck: the kernel was fast enough. Simulated streams that are threads with a delay have the same fault, only
// with other luck: the result depends on the delay and on the load of the machine, and right programs become slow.
//
// Here a stream is a queue and nothing else; there are no threads and no clock. An operation that is submitted waits in
// the queue until somebody *demands* it: `synchronize` of its stream, its device or an event behind it, a blocking copy,
// an operation that the CPU computes, or the wait of another stream that is itself demanded. A demand runs what it
// needs and nothing more. So an operation runs as late as the program's own ordering allows, and a program that forgot
// to ask for an order sees, every time, the memory from before the operation. A right program computes the same as
// ever, and never sleeps.
//
// Three consequences had to be decided.
// * Polling. `query` of an event or stream demands nothing, yet a loop around it must end. So each query that answers
//   "not yet" runs one operation of those that are missing: a poller needs at most as many queries as operations.
// * A free choice. Where two streams are both demanded and unordered, the one whose next operation was submitted last
//   runs first: the reverse of the program's order, since that order is the one in which the mistake is invisible.
// * Memory. As in CUDA's launch queue, 1,024 operations may wait in a stream; then submitting runs the oldest.
//
// Work that runs *early* also reveals mistakes (host memory that is written after the copy from it was submitted), and
// some need a mixture. So the delay is a setting: "late" as above, "none" (at submission, if the waits permit), or a
// seed, with which the operations that run at each submission are drawn at random.

// Without this, some of torch's headers include the declarations of all operators, which takes most of the time.
#define AT_PER_OPERATOR_HEADERS
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/add_cpu_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/div_cpu_dispatch.h>
#include <ATen/ops/fill_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul_cpu_dispatch.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sub_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using c10::DeviceIndex;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 64;
constexpr size_t kLaunchQueue = 1024;

// ---------------------------------------------------------------------------------------------------------------------
// 1. Settings and the one lock
//
// One mutex guards everything: queues, allocator, registered memory. Operations run with it held, and none of them
// needs Python, so a thread that holds Python's lock may wait for this one. Nothing here is ever destroyed, because
// tensors may outlive the end of `main`.

struct Settings {
  int devices = 1;
  size_t memory = 0;
  bool late = true;
  bool random = false;
  std::mt19937_64 draw;
};
Settings& settings = *new Settings();
std::mutex& lock = *new std::mutex();
thread_local DeviceIndex current_device = 0;
thread_local int64_t current_stream_id[kMostDevices] = {};

// A forked child has the queues but not the device, as with CUDA: each use raises. Memory that the parent shares with
// other processes would otherwise be written by both.
bool used = false, forked = false;
void check_usable() {
  TORCH_CHECK(!forked, "sim can't be used in a process that was forked after its parent had used sim; start such ",
              "processes with the method 'spawn', or use no sim device before the fork");
  used = true;
}
DeviceIndex check_index(int64_t index) {
  TORCH_CHECK(index < settings.devices, "sim:", index, " does not exist: simulated_device.install made ",
              settings.devices, " device", settings.devices == 1 ? " (sim:0)" : "s (sim:0 to sim:",
              settings.devices == 1 ? "" : std::to_string(settings.devices - 1) + ")");
  return index < 0 ? current_device : static_cast<DeviceIndex>(index);
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. Streams: queues of operations, and the demands that run them
//
// An event is a position in a stream: it has completed when the stream has completed that many operations. A wait is
// an operation that has such a position of another stream before it. A position exists before the wait on it is
// submitted, so waits can't form a cycle.
//
// Each operation also has a beginning and an end in virtual time, from which events take their time stamps and the
// timeline its picture: it begins when it was submitted, the stream's previous operation has ended and the position
// waited for has passed, and lasts 5 microseconds and one for each 10,000 bytes. These times follow from what was
// submitted, not from when this process happened to run it.

struct SimStream;
struct Position {
  SimStream* stream = nullptr;
  uint64_t count = 0;
  double passed_at = 0;  // virtual microseconds, known once it has completed
  bool completed() const;
};
struct Operation {
  std::string name;
  std::function<void()> run;
  std::shared_ptr<Position> after;  // of another stream; null if it waits for none
  std::shared_ptr<Position> marks;  // the event that this operation completes, or null
  size_t bytes = 0;
  double submitted_at = 0;
  uint64_t serial = 0;
};
struct SimStream {
  DeviceIndex device;
  int64_t id;
  std::deque<Operation> queue;
  uint64_t submitted = 0, completed = 0;
  double ended_at = 0;
  std::string error;
};
bool Position::completed() const { return stream == nullptr || stream->completed >= count; }

// One operation of the timeline: device, stream, name, and the times at which it was submitted, began and ended.
using Span = std::tuple<int64_t, int64_t, std::string, double, double, double>;
std::vector<std::vector<SimStream*>>& streams = *new std::vector<std::vector<SimStream*>>(kMostDevices);
std::vector<Span>* timeline = nullptr;
uint64_t submissions = 0;
// Each thread has a clock, which starts at 0. A timeline sets a floor: from then on no clock is behind what had run.
thread_local double host_time = 0;
double clock_floor = 0;

SimStream* new_stream(DeviceIndex device) {
  auto& of_device = streams[device];
  of_device.push_back(new SimStream{device, static_cast<int64_t>(of_device.size())});
  return of_device.back();
}
SimStream* find_stream(DeviceIndex device, int64_t id) {
  auto& of_device = streams[device];
  if (of_device.empty()) new_stream(device);
  TORCH_CHECK(id >= 0 && id < static_cast<int64_t>(of_device.size()), "sim:", int(device), " has no stream ", id);
  return of_device[id];
}
SimStream* find_stream(const c10::Stream& stream) { return find_stream(stream.device_index(), stream.id()); }
SimStream* current_stream(DeviceIndex device) { return find_stream(device, current_stream_id[device]); }

// Run the operation at the head of a stream; all that it waits for has completed. Operations are calls of torch's CPU
// kernels. They must not see the modes of the thread that happens to demand them (a dispatch mode written in Python,
// autograd), so those are switched off. As with CUDA, a failure is reported by the next wait for the stream.
void run_head(SimStream* stream) {
  auto operation = std::move(stream->queue.front());
  stream->queue.pop_front();
  auto begin = std::max(operation.submitted_at, stream->ended_at);
  if (operation.after) begin = std::max(begin, operation.after->passed_at);
  auto lasts = operation.run ? 5 + operation.bytes / 10000.0 : 0;
  stream->ended_at = begin + lasts;
  if (operation.marks) operation.marks->passed_at = stream->ended_at;
  if (operation.run) {
    if (timeline)
      timeline->emplace_back(stream->device, stream->id, operation.name, operation.submitted_at - clock_floor,
                             begin - clock_floor, begin + lasts - clock_floor);
    try {
      c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
      at::AutoDispatchBelowADInplaceOrView no_autograd;
      operation.run();
    } catch (const c10::Error& error) {
      if (stream->error.empty()) stream->error = error.what_without_backtrace();
    } catch (const std::exception& error) {
      if (stream->error.empty()) stream->error = error.what();
    }
  }
  ++stream->completed;
}

// Run what is missing up to a position, with what that waits for on other streams, or only the first `most` of it. An
// explicit stack instead of recursion: programs chain thousands of waits.
void demand(SimStream* stream, uint64_t count, size_t most = SIZE_MAX) {
  std::vector<std::pair<SimStream*, uint64_t>> missing{{stream, count}};
  while (!missing.empty() && most > 0) {
    auto [next, up_to] = missing.back();
    if (next->completed >= up_to) {
      missing.pop_back();
    } else if (auto& after = next->queue.front().after; after && !after->completed()) {
      missing.push_back({after->stream, after->count});
    } else {
      run_head(next);
      --most;
    }
  }
}
void demand_all(const std::vector<SimStream*>& wanted) {
  for (;;) {
    SimStream* last = nullptr;
    for (auto* stream : wanted)
      if (!stream->queue.empty() && (!last || stream->queue.front().serial > last->queue.front().serial)) last = stream;
    if (!last) return;
    demand(last, last->completed + 1);
  }
}
void raise_failure(SimStream* stream) {
  if (stream->error.empty()) return;
  auto error = std::move(stream->error);
  stream->error.clear();
  TORCH_CHECK(false, error);
}
void wait_for_host(SimStream* stream, uint64_t count, double passed_at) {
  demand(stream, count);
  host_time = std::max(host_time, passed_at);
  raise_failure(stream);
}

void submit(SimStream* stream, Operation operation) {
  check_usable();
  operation.submitted_at = host_time = std::max(host_time, clock_floor) + 1;
  operation.serial = ++submissions;
  stream->queue.push_back(std::move(operation));
  ++stream->submitted;
  if (settings.random) {
    for (auto& of_device : streams)
      for (auto* other : of_device)
        if (!other->queue.empty() && settings.draw() % 4 == 0) demand(other, other->completed + 1);
  } else if (!settings.late) {
    demand(stream, stream->submitted);
  }
  if (stream->queue.size() > kLaunchQueue) demand(stream, stream->completed + 1);
}
void finish(SimStream* stream) {
  demand(stream, stream->submitted);
  wait_for_host(stream, stream->submitted, stream->ended_at);
}
std::shared_ptr<Position> mark(SimStream* stream) {
  auto position = std::make_shared<Position>(Position{stream, stream->submitted + 1});
  Operation event{"event"};
  event.marks = position;
  submit(stream, std::move(event));
  return position;
}
void wait(SimStream* stream, const std::shared_ptr<Position>& position) {
  if (position->stream == stream) return;
  Operation waiting{"wait"};
  waiting.after = position;
  submit(stream, std::move(waiting));
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. The guard: how torch asks for devices, streams and events

struct SimEvent {
  std::shared_ptr<Position> position;
  bool timed = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream handle(const SimStream* stream) {
    return c10::Stream(c10::Stream::UNSAFE, {kSim, stream->device}, stream->id);
  }
  c10::DeviceType type() const override { return kSim; }
  c10::Device getDevice() const override { return {kSim, current_device}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = current_device;
    setDevice(device);
    return {kSim, before};
  }
  void setDevice(c10::Device device) const override { current_device = check_index(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < settings.devices) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(settings.devices); }

  c10::Stream getStream(c10::Device device) const override {
    auto index = check_index(device.index());
    return c10::Stream(c10::Stream::UNSAFE, {kSim, index}, current_stream_id[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kSim, check_index(device.index())});
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto index = check_index(device.index());
    check_usable();
    std::lock_guard<std::mutex> held(lock);
    find_stream(index, 0);
    return handle(new_stream(index));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream_id[check_index(stream.device_index())] = stream.id();
    return before;
  }

  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag flag) const override {
    if (!*event) *event = new SimEvent();
    std::lock_guard<std::mutex> held(lock);
    auto* recorded = static_cast<SimEvent*>(*event);
    recorded->timed = flag != c10::EventFlag::PYTORCH_DEFAULT;
    recorded->position = mark(find_stream(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    std::lock_guard<std::mutex> held(lock);
    if (auto position = static_cast<SimEvent*>(event)->position) wait(find_stream(stream), position);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    std::lock_guard<std::mutex> held(lock);
    auto position = static_cast<SimEvent*>(event)->position;
    return !position || ran_before(position->stream, position->count);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    check_usable();
    std::lock_guard<std::mutex> held(lock);
    if (auto position = static_cast<SimEvent*>(event)->position) {
      demand(position->stream, position->count);
      wait_for_host(position->stream, position->count, position->passed_at);
    }
  }
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    std::lock_guard<std::mutex> held(lock);
    auto *first = static_cast<SimEvent*>(from), *second = static_cast<SimEvent*>(to);
    TORCH_CHECK(first && second && first->timed && second->timed,
                "elapsed_time needs two recorded events that were made with enable_timing=True");
    TORCH_CHECK(first->position->completed() && second->position->completed(),
                "elapsed_time needs events that have completed: synchronize the second one first");
    return (second->position->passed_at - first->position->passed_at) / 1000;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<SimEvent*>(event); }

  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> held(lock);
    auto* asked = find_stream(stream);
    return ran_before(asked, asked->submitted);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check_usable();
    std::lock_guard<std::mutex> held(lock);
    finish(find_stream(stream));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    check_usable();
    std::lock_guard<std::mutex> held(lock);
    auto& all = streams[check_index(device)];
    demand_all(all);
    for (auto* stream : all) finish(stream);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;

 private:
  static bool ran_before(SimStream* stream, uint64_t count) {
    check_usable();
    if (stream->completed >= count) return true;
    demand(stream, count, 1);
    return false;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---------------------------------------------------------------------------------------------------------------------
// 4. Memory of the devices
//
// The memory of a device is a file without a name (`memfd`) that is mapped whole; pages that nobody touches cost
// nothing. Being a file, another process can map it: that is all an IPC handle needs.
//
// A freed block belongs to the stream on which it was allocated, and the next allocation there of the same size class
// gets it at once, while operations that use it may still be queued. On that stream this is right: queued operations
// run before those of the new owner. Another stream that still uses the block must be named by `record_stream`; then
// the block is set aside until the positions that those streams had at the free have passed. Where `record_stream` was
// forgotten, the new owner's first operation destroys the data: each allocation submits one that fills the block with
// 0xff, which is NaN in every floating-point dtype. The same filling shows memory that is read before it is written.
// Loops compute the same numbers again and again, in the same blocks: to read the last iteration's number by mistake
// looks right. So a block that is freed while its stream has nothing queued is filled at once.
//
// Size classes: four to each power of two, at least 512 bytes. Blocks are not split or merged: a program with many
// different sizes needs more memory than with CUDA's allocator, and the rules to be tested stay visible.

struct Arena {
  int fd = -1;
  char* base = nullptr;
  size_t bump = 0;  // bytes that were ever given out
};
struct Block {
  DeviceIndex device;
  char* data;
  size_t size, requested;
  SimStream* stream;
  std::set<SimStream*> used_on;
  std::vector<Position> pending;  // of a freed block: what must pass before it is reused
};
size_t size_class(size_t bytes) {
  size_t power = 512;
  while (power * 2 <= bytes) power *= 2;
  return bytes <= 512 ? 512 : (bytes + power / 4 - 1) / (power / 4) * (power / 4);
}

struct Memory final : c10::DeviceAllocator {
  Arena arenas[kMostDevices];
  std::map<std::pair<SimStream*, size_t>, std::vector<Block*>> free_blocks;
  std::vector<Block*> set_aside;
  c10::CachingDeviceAllocator::DeviceStats stats[kMostDevices];
  std::map<DeviceIndex, size_t> blocks;

  Arena& arena(DeviceIndex device) {
    auto& found = arenas[device];
    if (!found.base) {
      found.fd = memfd_create(("sim:" + std::to_string(device)).c_str(), MFD_CLOEXEC);
      TORCH_CHECK(found.fd >= 0 && ftruncate(found.fd, static_cast<off_t>(settings.memory)) == 0,
                  "sim can't make a memory file of ", settings.memory, " bytes: ", strerror(errno));
      auto* base = mmap(nullptr, settings.memory, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, found.fd, 0);
      TORCH_CHECK(base != MAP_FAILED, "sim can't map ", settings.memory, " bytes for sim:", int(device), ": ",
                  strerror(errno), "; call install with a smaller memory=");
      found.base = static_cast<char*>(base);
    }
    return found;
  }

  c10::DataPtr allocate(size_t bytes) override {
    auto device = current_device;
    if (bytes == 0) return {nullptr, c10::Device(kSim, device)};
    check_usable();
    std::lock_guard<std::mutex> held(lock);
    auto* block = take(device, current_stream(device), size_class(bytes));
    block->requested = bytes;
    count(block, true);
    auto* data = block->data;
    submit(block->stream, {"allocate", [data, bytes] { memset(data, 0xff, bytes); }});
    return {data, block, &free_block, c10::Device(kSim, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Guard().synchronizeDevice(current_device);
    default_copy_data(to, from, bytes);
  }

  bool initialized() override { return true; }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> held(lock);
    if (data.get_deleter() != &free_block) return;  // empty, or memory of another process
    auto* block = static_cast<Block*>(data.get_context());
    if (auto* other = find_stream(stream); other != block->stream) block->used_on.insert(other);
  }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> held(lock);
    for (auto& [key, freed] : free_blocks)
      for (auto* block : freed)
        if (auto* stream = block->stream; stream->queue.empty()) {
          auto& found = arena(block->device);
          fallocate(found.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block->data - found.base,
                    static_cast<off_t>(block->size));
        }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> held(lock);
    return stats[check_index(device)];
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> held(lock);
    for (auto* all : all_stats(stats[check_index(device)]))
      for (auto& stat : *all) stat.reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> held(lock);
    for (auto* all : all_stats(stats[check_index(device)]))
      for (auto& stat : *all) stat.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard<std::mutex> held(lock);
    return {settings.memory - arenas[check_index(device)].bump, settings.memory};
  }

 private:
  static std::vector<c10::CachingAllocator::StatArray*> all_stats(c10::CachingDeviceAllocator::DeviceStats& of) {
    return {&of.allocation, &of.active, &of.allocated_bytes, &of.active_bytes, &of.reserved_bytes, &of.requested_bytes};
  }
  Block* take(DeviceIndex device, SimStream* stream, size_t size) {
    auto passed = [](Block* block) {
      return std::all_of(block->pending.begin(), block->pending.end(), [](auto& at) { return at.completed(); });
    };
    auto waiting = std::stable_partition(set_aside.begin(), set_aside.end(), [&](auto* b) { return !passed(b); });
    for (auto freed = waiting; freed != set_aside.end(); ++freed) give(*freed);
    set_aside.erase(waiting, set_aside.end());
    if (auto& freed = free_blocks[{stream, size}]; !freed.empty()) {
      auto* block = freed.back();
      freed.pop_back();
      return block;
    }
    auto& found = arena(device);
    if (found.bump + size > settings.memory) {
      ++stats[device].num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim:", int(device), " is out of memory: ", size,
                       " bytes were asked for, ", settings.memory - found.bump, " of ", settings.memory,
                       " are free (memory= of simulated_device.install)");
    }
    auto* block = new Block{device, found.base + found.bump, size, 0, stream, {}, {}};
    found.bump += size;
    memset(block->data, 0xff, size);
    for (auto& stat : stats[device].reserved_bytes) stat.increase(size);
    return block;
  }
  void give(Block* block) {
    block->pending.clear();
    free_blocks[{block->stream, block->size}].push_back(block);
  }
  void count(Block* block, bool taken) {
    auto& of = stats[block->device];
    for (auto [stat, amount] : {std::pair{&of.allocation, size_t{1}},
                                {&of.active, size_t{1}},
                                {&of.allocated_bytes, block->size},
                                {&of.active_bytes, block->size},
                                {&of.requested_bytes, block->requested}})
      for (auto& one : *stat) taken ? one.increase(amount) : one.decrease(amount);
  }
  static void free_block(void* context);
};
Memory& memory = *new Memory();
void Memory::free_block(void* context) {
  if (forked) return;
  std::lock_guard<std::mutex> held(lock);
  auto* block = static_cast<Block*>(context);
  memory.count(block, false);
  for (auto* stream : block->used_on) block->pending.push_back({stream, stream->submitted});
  block->used_on.clear();
  if (block->pending.empty() && block->stream->queue.empty()) memset(block->data, 0xff, block->size);
  block->pending.empty() ? memory.give(block) : memory.set_aside.push_back(block);
}
REGISTER_ALLOCATOR(kSim, &memory)
void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  memory.recordStream(data, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. Pinned host memory
//
// Only pinned memory is copied asynchronously. As in torch's allocator for CUDA, a pinned tensor may be freed while
// copies from or to it are queued: its block remembers their positions and is returned to the system once they have
// passed. Memory that the program allocated elsewhere and registered (`host_register`, CUDA's cudaHostRegister) has no
// such protection, there as here. To run a copy after that memory was unregistered or unmapped is a failure that the
// next wait for the stream reports.

struct HostBlock {
  size_t size;
  std::vector<Position> pending;
};
std::map<char*, HostBlock>& pinned = *new std::map<char*, HostBlock>();
std::map<char*, size_t>& registered = *new std::map<char*, size_t>();
std::vector<std::pair<char*, HostBlock>>& unpinned = *new std::vector<std::pair<char*, HostBlock>>();

template <class Found, class Size>
auto range_of(Found& ranges, const void* data, Size size) {
  auto* address = static_cast<char*>(const_cast<void*>(data));
  auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) return ranges.end();
  --next;
  return address < next->first + size(next->second) ? next : ranges.end();
}
auto pinned_block(const void* data) {
  return range_of(pinned, data, [](auto& block) { return block.size; });
}
auto registered_range(const void* data) {
  return range_of(registered, data, [](auto& size) { return size; });
}
bool is_pinned(const void* data) {
  return pinned_block(data) != pinned.end() || registered_range(data) != registered.end();
}
bool is_mapped(const char* data, size_t bytes) {
  auto page = static_cast<size_t>(getpagesize());
  auto begin = reinterpret_cast<size_t>(data) / page * page;
  return msync(reinterpret_cast<void*>(begin), reinterpret_cast<size_t>(data) + bytes - begin, MS_ASYNC) == 0;
}
void check_registered(const char* data, size_t bytes) {
  auto found = registered_range(data);
  TORCH_CHECK(found != registered.end() && is_mapped(data, bytes),
              "a copy on sim ran after its host memory was unregistered or freed: wait for the copy first");
}

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    std::lock_guard<std::mutex> held(lock);
    release();
    auto* data = static_cast<char*>(aligned_alloc(64, (bytes + 63) / 64 * 64));
    TORCH_CHECK(data, "sim can't allocate ", bytes, " bytes of pinned memory");
    memset(data, 0xff, bytes);
    pinned[data] = {bytes, {}};
    return {data, data, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  static void release() {
    auto waiting = std::partition(unpinned.begin(), unpinned.end(), [](auto& freed) {
      auto& pending = freed.second.pending;
      return !std::all_of(pending.begin(), pending.end(), [](auto& at) { return at.completed(); });
    });
    for (auto freed = waiting; freed != unpinned.end(); ++freed) free(freed->first);
    unpinned.erase(waiting, unpinned.end());
  }
  static void unpin(void* data) {
    if (forked) return;
    std::lock_guard<std::mutex> held(lock);
    auto found = pinned.find(static_cast<char*>(data));
    unpinned.push_back({found->first, std::move(found->second)});
    pinned.erase(found);
    release();
  }
};
HostMemory& host_memory = *new HostMemory();

// ---------------------------------------------------------------------------------------------------------------------
// 6. Random numbers
//
// A generator of a device holds one of the CPU's, and lends it to the CPU kernels that compute for the device.

struct SimGenerator final : c10::GeneratorImpl {
  at::Generator cpu;
  SimGenerator(DeviceIndex device, at::Generator held)
      : GeneratorImpl({kSim, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(held)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "generators of sim have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "generators of sim have no offset"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return at::Generator(cpu).seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  SimGenerator* clone_impl() const override { return new SimGenerator(device().index(), cpu.clone()); }
};
at::Generator make_generator(DeviceIndex device) {
  return at::make_generator<SimGenerator>(device, at::detail::createCPUGenerator());
}
const at::Generator& default_generator(DeviceIndex device) {
  static auto& all = *[] {
    auto* made = new std::vector<at::Generator>();
    for (int each = 0; each < kMostDevices; ++each) made->push_back(make_generator(static_cast<DeviceIndex>(each)));
    return made;
  }();
  return all[check_index(device)];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex device) const override { return memory.arenas[check_index(device)].base; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(settings.devices); }
  void setCurrentDevice(DeviceIndex device) const override { current_device = check_index(device); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice({kSim, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> held(lock);
    return is_pinned(data);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    for (int device = 0; device < settings.devices; ++device) {
      auto* base = memory.arenas[device].base;
      if (base && data >= base && data < base + settings.memory) return {kSim, static_cast<DeviceIndex>(device)};
    }
    TORCH_CHECK(false, "the address belongs to no memory of sim");
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return make_generator(check_index(device)); }

  // Storage of another size, in stream order: a new block, and a copy of what both have.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = memory.allocate(bytes);
    if (auto both = std::min(bytes, storage.nbytes())) {
      std::lock_guard<std::mutex> held(lock);
      submit(current_stream(current_device),
             {"resize", [to = fresh.get(), from = storage.data(), both] { memcpy(to, from, both); }, {}, {}, both});
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// 7. Tensors: factories and views
//
// Views need no kernel: torch's own functions for the CPU make them from sizes and strides.

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           at::dtype_or_default(dtype));
}
at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   at::dtype_or_default(dtype), format);
}
void fit_storage(const at::Tensor& tensor) {
  auto bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(),
                                                tensor.storage_offset());
  if (tensor.numel() && bytes > tensor.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
}
const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (tensor.sizes() != size) {
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    fit_storage(tensor);
  }
  if (format && *format != at::MemoryFormat::Preserve) tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return tensor;
}
at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  TORCH_CHECK(storage.device() == tensor.device(), "set_ of a tensor on ", tensor.device(), " needs storage there, not ",
              storage.device());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  stride.empty() && !size.empty() ? impl->set_sizes_contiguous(size) : impl->set_sizes_and_strides(size, stride);
  fit_storage(tensor);
  return tensor;
}
at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  auto elements = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return set_storage(tensor, std::move(storage), 0, {elements}, {});
}
at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor as_strided(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}
void record_stream(at::Tensor& tensor, c10::Stream stream) { memory.recordStream(tensor.storage().data_ptr(), stream); }

// ---------------------------------------------------------------------------------------------------------------------
// 8. Kernels: copies, fill, arithmetic
//
// A kernel is the CPU's kernel on the device's bytes, run later. It keeps addresses, not tensors, as a launched CUDA
// kernel does: to keep memory alive is the caller's and the allocator's duty, and that is what is to be tested.

at::Tensor on_host(const at::Tensor& tensor) {
  auto alias = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                             tensor.options().device(at::kCPU).pinned_memory(false));
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}
size_t spanned(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize());
}
bool on_sim(const at::Tensor& tensor) { return tensor.device().type() == kSim; }

// The three directions differ in who waits. Between devices, the copy runs on the source's stream, after what the
// destination's stream has queued, and that stream waits for it. Between host and device, the host waits unless the
// host's side is pinned and the caller said `non_blocking`; ordinary host memory is copied aside at once, as CUDA does.
// Since torch 2.13 a new reference to a tensor that Python has may take Python's interpreter lock. A thread that holds it
// may wait for `lock` here (torch keeps it while an event is recorded), so no reference is made under `lock`.
void submit_copy(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto& device_side = on_sim(source) ? source : target;
  auto& host_side = on_sim(source) ? target : source;
  auto to_device = on_sim(target);
  auto to = on_host(target), from = on_host(source);
  std::lock_guard<std::mutex> held(lock);
  auto* stream = current_stream(device_side.device().index());
  Operation copy{on_sim(source) && to_device ? "copy" : to_device ? "copy to device" : "copy to host"};
  copy.bytes = target.nbytes();
  auto run = [to, from]() mutable { at::native::copy_(to, from, false); };
  if (on_sim(source) && to_device) {
    copy.run = std::move(run);
    auto* other = current_stream(target.device().index());
    if (other != stream) wait(stream, mark(other));
    submit(stream, std::move(copy));
    if (other != stream) wait(other, mark(stream));
    return;
  }
  auto* data = static_cast<char*>(const_cast<void*>(host_side.const_data_ptr()));
  auto block = pinned_block(data);
  if (block != pinned.end()) {
    copy.run = std::move(run);
  } else if (registered_range(data) != registered.end()) {
    copy.run = [run, data, bytes = spanned(host_side)]() mutable {
      check_registered(data, bytes);
      run();
    };
  } else if (to_device && non_blocking) {
    auto aside = at::Tensor(at::detail::empty_cpu(source.sizes(), source.options().pinned_memory(false)));
    at::native::copy_(aside, from, false);
    copy.run = [to, aside]() mutable { at::native::copy_(to, aside, false); };
  } else {
    copy.run = std::move(run);
  }
  auto waits = !non_blocking || (!to_device && !is_pinned(data));
  submit(stream, std::move(copy));
  if (block != pinned.end()) {
    auto& pending = block->second.pending;
    pending.erase(std::remove_if(pending.begin(), pending.end(), [](auto& at) { return at.completed(); }), pending.end());
    pending.push_back({stream, stream->submitted});
  }
  if (waits) finish(stream);
}
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() > 0) submit_copy(source, target, non_blocking);
  return target;
}
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

void check_dtype(const char* kernel, const at::Tensor& tensor) {
  auto dtype = tensor.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(
      dtype <= at::ScalarType::ComplexDouble ? dtype != at::ScalarType::ComplexHalf
                                             : dtype == at::ScalarType::Bool || dtype == at::ScalarType::BFloat16,
      "sim has no kernel ", kernel, " for ", dtype, ", as the CPU has none: cast to another dtype first");
}
at::Tensor& fill(at::Tensor& tensor, const at::Scalar& value) {
  if (tensor.numel() == 0) return tensor;
  std::lock_guard<std::mutex> held(lock);
  submit(current_stream(tensor.device().index()),
         {"fill", [to = on_host(tensor), value]() mutable { at::native::fill_(to, value); }, {}, {}, tensor.nbytes()});
  return tensor;
}
at::Tensor& zero(at::Tensor& tensor) { return fill(tensor, 0); }

// Operands of arithmetic: a tensor of the result's device, or one number in host memory, which is copied at once.
at::Tensor operand(const char* kernel, const at::Tensor& tensor, const at::Tensor& out) {
  if (on_sim(tensor)) {
    TORCH_CHECK(tensor.device() == out.device(), kernel, " on sim needs tensors of one device, not of ",
                tensor.device(), " and ", out.device());
    check_dtype(kernel, tensor);
    return on_host(tensor);
  }
  TORCH_CHECK(tensor.dim() == 0, kernel, " on sim needs tensors of one device, not of ", tensor.device(), " and ",
              out.device());
  auto number = at::Tensor(at::detail::empty_cpu({}, tensor.options().pinned_memory(false)));
  at::native::copy_(number, tensor, false);
  number.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return number;
}
template <class Kernel>
at::Tensor& arithmetic(const char* name, const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool divides,
                       Kernel kernel) {
  auto x = operand(name, a, out), y = operand(name, b, out);
  check_dtype(name, out);
  auto dtype = at::result_type(a, b);
  if (divides && c10::isIntegralType(dtype, true)) dtype = c10::get_default_dtype_as_scalartype();
  TORCH_CHECK(c10::canCast(dtype, out.scalar_type()), "result type ", dtype, " can't be cast to the output type ",
              out.scalar_type());
  at::native::resize_output(out, at::infer_size(a.sizes(), b.sizes()));
  if (out.numel() == 0) return out;
  std::lock_guard<std::mutex> held(lock);
  submit(current_stream(out.device().index()),
         {name, [kernel, x, y, z = on_host(out)]() mutable { kernel(z, x, y); }, {}, {}, out.nbytes()});
  return out;
}
at::Tensor& add(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha, at::Tensor& out) {
  return arithmetic("add", a, b, out, false, [alpha](auto& z, auto& x, auto& y) { at::cpu::add_out(z, x, y, alpha); });
}
at::Tensor& sub(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha, at::Tensor& out) {
  return arithmetic("sub", a, b, out, false, [alpha](auto& z, auto& x, auto& y) { at::cpu::sub_out(z, x, y, alpha); });
}
at::Tensor& mul(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  return arithmetic("mul", a, b, out, false, [](auto& z, auto& x, auto& y) { at::cpu::mul_out(z, x, y); });
}
at::Tensor& div(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  return arithmetic("div", a, b, out, true, [](auto& z, auto& x, auto& y) { at::cpu::div_out(z, x, y); });
}

// Every other operation: torch copies its tensors to the host, which waits for the stream, computes, and copies back.
// A generator in its arguments is exchanged for the CPU's that it holds.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& arguments = op.schema().arguments();
  auto device = current_device;
  auto found = false;
  std::optional<c10::Device> elsewhere;
  for (auto& value : torch::jit::last(*stack, arguments.size()))
    if (value.isTensor() && value.toTensor().defined()) {
      auto where = value.toTensor().device();
      found = where.type() == kSim;
      if (found) {
        device = where.index();
        break;
      }
      elsewhere = where;
    }
  for (size_t at = 0; at < arguments.size(); ++at) {
    auto& value = torch::jit::peek(*stack, at, arguments.size());
    if (arguments[at].name() == "generator" && (value.isNone() || value.isGenerator())) {
      auto generator = value.isNone() ? default_generator(device) : value.toGenerator();
      TORCH_CHECK(found || !elsewhere || generator.device().type() != kSim, "a generator of ", generator.device(),
                  " draws numbers for tensors there, and this one is on ", *elsewhere);
      if (generator.device().type() == kSim) value = static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
    }
  }
  c10::DeviceGuard guard({kSim, device});
  at::native::cpu_fallback(op, stack);
}

// torch's older operator for batch normalization does not say that it writes the running statistics, so the fallback
// would drop them. The newer one, which says it, computes the same.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double epsilon) {
  if (!mean || !mean->defined())
    return at::_native_batch_norm_legit(input, weight, bias, training, momentum, epsilon);
  auto running_mean = *mean, running_variance = *variance;
  return at::_native_batch_norm_legit(input, weight, bias, running_mean, running_variance, training, momentum, epsilon);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("fill_.Scalar", &fill);
  m.impl("zero_", &zero);
  m.impl("add.out", &add);
  m.impl("sub.out", &sub);
  m.impl("mul.out", &mul);
  m.impl("div.out", &div);
  m.impl("native_batch_norm", &batch_norm);
}

// A lazy conjugate or negative is resolved by a copy, so the copy itself must take it as it is.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// ---------------------------------------------------------------------------------------------------------------------
// 9. Functions for `torch.sim`
//
// They are operators, so that no header of Python is needed: one library serves every version of Python.

void set_delay(bool late, bool random, int64_t seed) {
  std::lock_guard<std::mutex> held(lock);
  settings.late = late;
  settings.random = random;
  settings.draw.seed(static_cast<uint64_t>(seed));
}
void configure(int64_t devices, int64_t bytes) {
  settings.devices = static_cast<int>(devices);
  settings.memory = static_cast<size_t>(bytes);
  pthread_atfork(nullptr, nullptr, [] { forked = used; });
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}
void host_register(int64_t address, int64_t bytes) {
  auto* data = reinterpret_cast<char*>(address);
  TORCH_CHECK(bytes > 0 && is_mapped(data, static_cast<size_t>(bytes)), "host_register needs memory that is mapped");
  std::lock_guard<std::mutex> held(lock);
  registered[data] = static_cast<size_t>(bytes);
}
void host_unregister(int64_t address) {
  std::lock_guard<std::mutex> held(lock);
  TORCH_CHECK(registered.erase(reinterpret_cast<char*>(address)), "host_unregister: this address is not registered");
}

// An IPC handle names a process, the descriptor of its memory, the file's inode (to notice that a number was reused)
// and a range. The other process opens the descriptor through /proc, which asks for the same user.
std::string ipc_handle(const at::Tensor& tensor) {
  TORCH_CHECK(on_sim(tensor), "an IPC handle needs a tensor on sim, not on ", tensor.device());
  auto device = tensor.device().index();
  std::lock_guard<std::mutex> held(lock);
  auto& found = memory.arena(device);
  auto* data = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  TORCH_CHECK(data >= found.base && data < found.base + settings.memory, "an IPC handle needs memory of this process");
  struct stat file {};
  fstat(found.fd, &file);
  std::ostringstream handle;
  handle << getpid() << ' ' << found.fd << ' ' << file.st_ino << ' ' << data - found.base << ' '
         << tensor.storage().nbytes() << ' ' << int(device);
  return handle.str();
}
struct Mapping {
  void* base;
  size_t bytes;
  DeviceIndex device;
};
void unmap(void* context) {
  auto* mapping = static_cast<Mapping*>(context);
  if (!forked) {  // as cudaIpcCloseMemHandle does
    std::lock_guard<std::mutex> held(lock);
    demand_all(streams[mapping->device]);
  }
  munmap(mapping->base, mapping->bytes);
  delete mapping;
}
at::Tensor open_ipc_handle(std::string handle) {
  int64_t pid = 0, fd = 0, inode = 0, offset = 0, bytes = 0, device = 0;
  std::istringstream in(handle);
  TORCH_CHECK(in >> pid >> fd >> inode >> offset >> bytes >> device, "this is no IPC handle of sim: ", handle);
  check_index(device);
  auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  auto opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat file {};
  if (opened >= 0) fstat(opened, &file);
  if (opened < 0 || static_cast<int64_t>(file.st_ino) != inode) {
    auto why = opened < 0 ? strerror(errno) : "its memory was closed";
    if (opened >= 0) close(opened);
    TORCH_CHECK(false, "the IPC handle of process ", pid, " can't be opened: ", why);
  }
  auto page = static_cast<int64_t>(getpagesize());
  auto begin = offset / page * page;
  auto length = static_cast<size_t>(offset + bytes - begin);
  auto* base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, opened, begin);
  close(opened);
  TORCH_CHECK(base != MAP_FAILED, "the IPC handle of process ", pid, " can't be mapped: ", strerror(errno));
  auto* data = static_cast<char*>(base) + (offset - begin);
  auto index = static_cast<DeviceIndex>(device);
  c10::DataPtr pointer(data, new Mapping{base, length, index}, &unmap, c10::Device(kSim, index));
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(bytes),
                                                       std::move(pointer), nullptr, false);
  auto tensor = empty({0}, at::kByte, {}, c10::Device(kSim, index), {}, {});
  return set_whole_storage(tensor, c10::Storage(std::move(storage)));
}

void start_timeline() {
  std::lock_guard<std::mutex> held(lock);
  TORCH_CHECK(!timeline, "a timeline of sim is being recorded already");
  timeline = new std::vector<Span>();
  clock_floor = std::max(clock_floor, host_time);
  for (auto& of_device : streams)
    for (auto* stream : of_device) clock_floor = std::max(clock_floor, stream->ended_at);
}
std::vector<Span> stop_timeline() {
  std::lock_guard<std::mutex> held(lock);
  std::unique_ptr<std::vector<Span>> recorded(std::exchange(timeline, nullptr));
  return recorded ? std::move(*recorded) : std::vector<Span>();
}
int64_t pending(int64_t device) {
  std::lock_guard<std::mutex> held(lock);
  size_t queued = 0;
  for (auto* stream : streams[check_index(device)]) queued += stream->queue.size();
  return static_cast<int64_t>(queued);
}

TORCH_LIBRARY(simulated_device, m) {
  m.def("configure", &configure);
  m.def("set_delay", &set_delay);
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister);
  m.def("ipc_handle", &ipc_handle);
  m.def("open_ipc_handle", &open_ipc_handle);
  m.def("start_timeline", &start_timeline);
  m.def("stop_timeline", &stop_timeline);
  m.def("pending", &pending);
  m.def("device_count", [] { return static_cast<int64_t>(settings.devices); });
  m.def("default_generator", [](int64_t device) { return default_generator(check_index(device)); });
  m.def("in_bad_fork", [] { return forked; });
  m.def("is_used", [] { return used; });
}

}  // namespace
