// A device of torch's without hardware: memory of the host, streams that are threads, events.
//
// Torch's generic streams, events, page-locked memory and copies run on it as they do on a GPU:
// later, each piece of work after a random `delay`. `hold` stops all streams, so whatever a test
// sees before `release` was not waited for. Its calls for many copies and page-locks have the names,
// arguments and rules of libcuda's.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr auto kToy = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kToy, 0);

// Threads of streams wait for them until the process is gone.
std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
bool held = false;
bool lost = false;
int delay_us = 0;

struct Queue {
  std::deque<std::function<void()>> work;
  long submitted = 0, ran = 0;
  int priority = 0;
};
std::deque<std::unique_ptr<Queue>>& queues = *new std::deque<std::unique_ptr<Queue>>;
thread_local c10::StreamId current = 0;

void expect_alive() {
  TORCH_CHECK(!lost, "toy: the device fell off the bus");
}

void serve(Queue* queue) {
  std::minstd_rand draw(static_cast<unsigned>(reinterpret_cast<uintptr_t>(queue)));
  std::unique_lock<std::mutex> lock(mutex);
  while (true) {
    changed.wait(lock, [&] { return !queue->work.empty() && !held; });
    auto work = std::move(queue->work.front());
    queue->work.pop_front();
    int most_us = delay_us;
    lock.unlock();
    if (most_us) std::this_thread::sleep_for(std::chrono::microseconds(draw() % most_us));
    work();
    work = nullptr;
    lock.lock();
    queue->ran++;
    changed.notify_all();
  }
}

// Streams are handed out in turns, as CUDA's are: those of one cache are all different.
constexpr size_t kStreams = 4;
std::map<int, std::deque<c10::StreamId>>& handed_out = *new std::map<int, std::deque<c10::StreamId>>;

c10::StreamId new_queue(int priority) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& pool = handed_out[priority];
  if (pool.size() == kStreams) {
    pool.push_back(pool.front());
    pool.pop_front();
    return pool.back();
  }
  pool.push_back(static_cast<c10::StreamId>(queues.size()));
  queues.push_back(std::make_unique<Queue>());
  queues.back()->priority = priority;
  std::thread(serve, queues.back().get()).detach();
  return static_cast<c10::StreamId>(queues.size() - 1);
}

Queue& queue_of(c10::StreamId id) {
  return *queues.at(static_cast<size_t>(id));
}

void submit(c10::StreamId id, std::function<void()> work) {
  expect_alive();
  std::lock_guard<std::mutex> lock(mutex);
  Queue& queue = queue_of(id);
  // Torch's inference mode is a thread's: work runs in that of the thread that asked for it.
  bool inference = c10::InferenceMode::is_enabled();
  queue.work.push_back([inference, work = std::move(work)] {
    c10::InferenceMode mode(inference);
    work();
  });
  queue.submitted++;
  changed.notify_all();
}

void wait_for(const std::function<bool()>& reached) {
  py::gil_scoped_release released;
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return reached() || lost; });
  TORCH_CHECK(!lost, "toy: the device fell off the bus");
}

void synchronize(c10::StreamId id) {
  Queue& queue = queue_of(id);
  long until;
  {
    std::lock_guard<std::mutex> lock(mutex);
    until = queue.submitted;
  }
  if (PyGILState_Check()) {
    wait_for([&] { return queue.ran >= until; });
    return;
  }
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return queue.ran >= until || lost; });
  TORCH_CHECK(!lost, "toy: the device fell off the bus");
}

// -- memory

std::mutex memory_mutex;
std::map<uintptr_t, size_t> on_device, locked;

bool within(const std::map<uintptr_t, size_t>& ranges, const void* data, size_t nbytes) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto address = reinterpret_cast<uintptr_t>(data);
  auto found = ranges.upper_bound(address);
  if (found == ranges.begin()) return false;
  --found;
  return address + nbytes <= found->first + found->second;
}

template <bool kIsDevice>
struct Memory final : c10::Allocator {
  static std::map<uintptr_t, size_t>& ranges() { return kIsDevice ? on_device : locked; }
  static void release(void* data) {
    if (data == nullptr) return;
    std::lock_guard<std::mutex> lock(memory_mutex);
    ranges().erase(reinterpret_cast<uintptr_t>(data));
    std::free(data);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nullptr;
    if (nbytes) {
      TORCH_CHECK(posix_memalign(&data, 512, nbytes) == 0, "toy: no memory");
      std::memset(data, 0xAB, nbytes);
      std::lock_guard<std::mutex> lock(memory_mutex);
      ranges()[reinterpret_cast<uintptr_t>(data)] = nbytes;
    }
    return {data, data, &release, kIsDevice ? kDevice : c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* into, const void* from, size_t nbytes) const override {
    std::memcpy(into, from, nbytes);
  }
};
Memory<true> device_memory;
Memory<false> locked_memory;

// -- streams and events

struct Event {
  Queue* queue;
  long at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kToy; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream stream(c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
  }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int priority) const override {
    return stream(new_queue(priority));
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = current;
    current = next.id();
    return stream(before);
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    expect_alive();
    delete static_cast<Event*>(*event);
    std::lock_guard<std::mutex> lock(mutex);
    Queue& queue = queue_of(on.id());
    *event = new Event{&queue, queue.submitted};
  }
  void block(void* event, const c10::Stream& on) const override {
    auto point = *static_cast<Event*>(event);
    submit(on.id(), [point] {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [&] { return point.queue->ran >= point.at; });
    });
  }
  bool queryEvent(void* event) const override {
    expect_alive();
    auto point = static_cast<Event*>(event);
    std::lock_guard<std::mutex> lock(mutex);
    return point == nullptr || point->queue->ran >= point->at;
  }
  void synchronizeEvent(void* event) const override {
    auto point = *static_cast<Event*>(event);
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return point.queue->ran >= point.at || lost; });
    TORCH_CHECK(!lost, "toy: the device fell off the bus");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  bool queryStream(const c10::Stream& on) const override {
    std::lock_guard<std::mutex> lock(mutex);
    Queue& queue = queue_of(on.id());
    return queue.ran >= queue.submitted;
  }
  void synchronizeStream(const c10::Stream& on) const override { synchronize(on.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (size_t id = 0; id < queues.size(); id++) synchronize(static_cast<c10::StreamId>(id));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &locked_memory; }
  bool isPinnedPtr(const void* data) const override { return within(locked, data, 1); }
};

// -- operators

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
at::Tensor bytes_of(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {},
      at::TensorOptions().dtype(tensor.dtype()));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  bool host = !source.is_privateuseone() || !target.is_privateuseone();
  auto on_host = source.is_privateuseone() ? target : source;
  auto read = source;
  bool pageable = host && !within(locked, on_host.data_ptr(), 1);
  if (pageable && !source.is_privateuseone()) read = source.clone();
  auto from = bytes_of(read), into = bytes_of(target);
  submit(current, [from, into] { into.copy_(from); });
  if (host && (!non_blocking || (pageable && source.is_privateuseone()))) synchronize(current);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) {
    auto made = at::empty(source.sizes(), target.options());
    target.set_(made.storage(), 0, made.sizes(), made.strides());
  }
  return copy_from(source, target, false);
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? offset->expect_int() : self.storage_offset());
  return result;
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  auto shape = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(size), self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), shape);
  TORCH_CHECK(stride.has_value(), "view: not of these strides");
  return self.as_strided(shape, *stride);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return self.as_strided(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& zero_(at::Tensor& self) {
  auto into = bytes_of(self);
  submit(current, [into]() mutable { into.zero_(); });
  return self;
}

at::Tensor& fill_(at::Tensor& self, const at::Scalar& value) {
  auto into = bytes_of(self);
  submit(current, [into, value]() mutable { into.fill_(value); });
  return self;
}

at::Tensor index_select(const at::Tensor& self, int64_t dim, const at::Tensor& index) {
  auto sizes = self.sizes().vec();
  sizes.at(dim) = index.numel();
  auto result = at::empty(sizes, self.options());
  auto from = bytes_of(self), rows = bytes_of(index), into = bytes_of(result);
  submit(current, [=]() mutable { at::index_select_out(into, from, dim, rows); });
  return result;
}

at::Tensor mm(const at::Tensor& left, const at::Tensor& right) {
  auto result = at::empty({left.size(0), right.size(1)}, left.options());
  auto a = bytes_of(left), b = bytes_of(right), into = bytes_of(result);
  submit(current, [=]() mutable { at::mm_out(into, a, b); });
  return result;
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  std::optional<at::Tensor> add;
  if (bias.has_value() && bias->defined()) add = bias->cpu();
  return at::convolution_symint(
             input.cpu(), weight.cpu(), add, stride, padding, dilation, transposed, output_padding,
             groups)
      .to(kDevice);
}

at::Tensor& index_copy_(at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Tensor& source) {
  auto from = bytes_of(source), rows = bytes_of(index), into = bytes_of(self);
  submit(current, [=]() mutable { into.index_copy_(dim, rows, from); });
  return self;
}

at::Tensor& index_fill_(
    at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Scalar& value) {
  auto rows = bytes_of(index), into = bytes_of(self);
  submit(current, [=]() mutable { into.index_fill_(dim, rows, value); });
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Tensor& set_all_storage(at::Tensor& self, at::Storage storage) {
  c10::SymInt n(static_cast<int64_t>(storage.nbytes() / self.element_size())), one(1);
  return set_storage(self, storage, 0, {n}, {one});
}

at::Scalar local_scalar(const at::Tensor& self) {
  return self.cpu().item();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("zero_", &zero_);
  m.impl("fill_.Scalar", &fill_);
  m.impl("index_select", &index_select);
  m.impl("index_copy_", &index_copy_);
  m.impl("index_fill_.int_Scalar", &index_fill_);
  m.impl("mm", &mm);
  m.impl("convolution_overrideable", &convolution);
  m.impl("set_.source_Storage", &set_all_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_local_scalar_dense", &local_scalar);
}

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

}  // namespace

// -- calls of libcuda

extern "C" {

struct Location { int type, id; };
struct Attributes { int order; Location source, target; unsigned flags; };
constexpr int kInvalid = 1, kNoMemory = 2, kLost = 46;

static int batch(
    void** targets, void** sources, size_t* sizes, size_t count, Attributes* attributes,
    size_t* firsts, size_t n_attributes, void* stream) {
  if (lost) return kLost;
  auto id = reinterpret_cast<c10::StreamId>(stream);
  if (!id || id >= static_cast<c10::StreamId>(queues.size()) || !count) return kInvalid;
  if (n_attributes != 1 || firsts[0] != 0 || attributes->order != 1 || attributes->flags > 1)
    return kInvalid;
  std::vector<std::tuple<void*, void*, size_t>> pieces;
  for (size_t at = 0; at < count; at++) {
    for (void* each : {targets[at], sources[at]})
      if (!within(on_device, each, sizes[at]) && !within(locked, each, sizes[at])) return kInvalid;
    if (!sizes[at]) return kInvalid;
    pieces.emplace_back(targets[at], sources[at], sizes[at]);
  }
  submit(id, [pieces] {
    for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece)
      std::memcpy(std::get<0>(*piece), std::get<1>(*piece), std::get<2>(*piece));
  });
  return 0;
}

int cuMemcpyBatchAsync_v2(
    void** targets, void** sources, size_t* sizes, size_t count, Attributes* attributes,
    size_t* firsts, size_t n_attributes, void* stream) {
  return batch(targets, sources, sizes, count, attributes, firsts, n_attributes, stream);
}

// The form of CUDA 12.8, under a name of its own: a library has either.
int toyMemcpyBatchAsync(
    void** targets, void** sources, size_t* sizes, size_t count, Attributes* attributes,
    size_t* firsts, size_t n_attributes, size_t* failed, void* stream) {
  *failed = count;
  return batch(targets, sources, sizes, count, attributes, firsts, n_attributes, stream);
}

int cuMemHostRegister_v2(void* data, size_t nbytes, unsigned flags) {
  if (flags != 1 || !nbytes || reinterpret_cast<uintptr_t>(data) % 4096) return kInvalid;
  if (nbytes > (size_t(1) << 32)) return kNoMemory;
  if (within(locked, data, 1)) return kInvalid;
  std::lock_guard<std::mutex> lock(memory_mutex);
  locked[reinterpret_cast<uintptr_t>(data)] = nbytes;
  return 0;
}

int cuMemHostUnregister(void* data) {
  if (lost) return kLost;
  std::lock_guard<std::mutex> lock(memory_mutex);
  return locked.erase(reinterpret_cast<uintptr_t>(data)) ? 0 : kInvalid;
}

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cuGetErrorString(int error, const char** text) {
  *text = error == kLost ? "device lost" : error == kNoMemory ? "out of memory" : "invalid argument";
  return 0;
}

}  // extern "C"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  new_queue(0);
  handed_out.clear();  // the default stream is nobody else's
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("hold", [] { std::lock_guard<std::mutex> lock(mutex); held = true; });
  m.def("release", [] { std::lock_guard<std::mutex> lock(mutex); held = false; changed.notify_all(); });
  m.def("lose", [](bool value) { std::lock_guard<std::mutex> lock(mutex); lost = value; changed.notify_all(); });
  m.def("delay", [](int most_us) { std::lock_guard<std::mutex> lock(mutex); delay_us = most_us; });
  m.def("n_locked", [] { std::lock_guard<std::mutex> lock(memory_mutex); return locked.size(); });
  m.def("settle", [] {
    { std::lock_guard<std::mutex> lock(mutex); held = false; lost = false; changed.notify_all(); }
    for (size_t id = 0; id < queues.size(); id++) synchronize(static_cast<c10::StreamId>(id));
  });
  m.def("priority", [](int64_t id) { return queue_of(id).priority; });
}
