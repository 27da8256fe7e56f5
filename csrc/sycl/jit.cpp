// JIT compilation: a small C library, compiled by any C++17 compiler against libsycl, that lets Intel's SYCL runtime
// compile the kernel files and runs them on its CPU device, directly on the memory of PyTorch CPU tensors.
// megatron/optimus/ops/sycl.py builds and calls it. It is for tests: it shows that the kernels are right, not fast.
#include "kernel_list.hpp"
#include "operations.hpp"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>

namespace syclexp = sycl::ext::oneapi::experimental;

namespace {

const std::map<std::string, std::string>& kernel_files() {
#define OPTIMUS_ENTRY(file, name) {#name, #file},
  static const std::map<std::string, std::string> files = {OPTIMUS_KERNELS(OPTIMUS_ENTRY)};
#undef OPTIMUS_ENTRY
  return files;
}

std::string read(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

using Executable = sycl::kernel_bundle<sycl::bundle_state::executable>;

class Runtime {
 public:
  explicit Runtime(const std::string& folder)
      : folder_(folder), launcher_{sycl::queue{sycl::cpu_selector_v, sycl::property::queue::in_order{}},
                                   [this](const std::string& name) { return kernel(name); },
                                   [this](int64_t bytes) { return allocate(bytes); }, true} {}

  std::string device() const {
    const auto device = launcher_.queue.get_device();
    return device.get_info<sycl::info::device::name>() + ", driver " +
           device.get_info<sycl::info::device::driver_version>();
  }

  // check_contents: whether indices and orders are read and checked here, as they are not on a GPU.
  void configure(int64_t group_items, int64_t block_slots, int64_t tile, bool check_contents) {
    if (group_items < 1 || group_items > 1024) optimus::fail("group_items = ", group_items, "; expected 1 to 1024");
    if (block_slots < 1 || block_slots > 1024) optimus::fail("block_slots = ", block_slots, "; expected 1 to 1024");
    if (tile != 16 && tile != 64) optimus::fail("tile = ", tile, "; expected 16 or 64");
    launcher_.group_items = group_items;
    launcher_.block_slots = block_slots;
    launcher_.tile = tile;
    launcher_.host_memory = check_contents;
  }

  void run(const std::string& name, const std::vector<optimus::Array>& arguments) {
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      optimus::run(launcher_, name, arguments);
      launcher_.queue.wait_and_throw();
    } catch (...) {
      launcher_.queue.wait();
      release();
      throw;
    }
    release();
  }

 private:
  sycl::kernel kernel(const std::string& name) {
    const auto known = kernels_.find(name);
    if (known != kernels_.end()) return known->second;
    const auto file = kernel_files().find(name);
    if (file == kernel_files().end()) throw std::runtime_error(name + " is not in kernel_list.hpp");
    return kernels_.emplace(name, bundle(file->second).ext_oneapi_get_kernel(name)).first->second;
  }

  Executable& bundle(const std::string& file) {
    const auto known = bundles_.find(file);
    if (known != bundles_.end()) return known->second;
    const syclexp::include_files includes{"types.hpp", read(folder_ + "/types.hpp")};
    const std::string text = read(folder_ + "/" + file + ".sycl");
    auto source = syclexp::create_kernel_bundle_from_source(
        launcher_.queue.get_context(), syclexp::source_language::sycl, text, syclexp::properties{includes});
    const std::vector<std::string> options{"-DOPTIMUS_COMPILED_AT_RUN_TIME", "-O2"};
    std::string log;
    try {
      const syclexp::properties properties{syclexp::build_options{options}, syclexp::save_log{&log}};
      return bundles_.emplace(file, syclexp::build(source, properties)).first->second;
    } catch (const sycl::exception& error) {
      throw std::runtime_error(file + ".sycl does not compile: " + error.what() + "\n" + log);
    }
  }

  void* allocate(int64_t bytes) {
    void* memory = sycl::malloc_device(bytes, launcher_.queue);
    if (memory == nullptr) throw std::bad_alloc();
    scratch_.push_back(memory);
    return memory;
  }
  void release() {
    for (void* memory : scratch_) sycl::free(memory, launcher_.queue);
    scratch_.clear();
  }

  std::string folder_;
  std::map<std::string, Executable> bundles_;
  std::map<std::string, sycl::kernel> kernels_;
  std::vector<void*> scratch_;
  static inline std::mutex mutex_;  // of all runtimes: run-time compilation is not thread-safe
  optimus::Launcher launcher_;
};

void copy(const std::string& text, char* to, size_t size) {
  std::strncpy(to, text.c_str(), size - 1);
  to[size - 1] = '\0';
}

// 0, or 1 for an argument that was refused, or 2 for a failure of the runtime; the message is in `message`.
template <typename Body>
int guarded(char* message, size_t size, Body body) {
  try {
    body();
    return 0;
  } catch (const std::invalid_argument& error) {
    copy(error.what(), message, size);
    return 1;
  } catch (const std::exception& error) {
    copy(error.what(), message, size);
    return 2;
  }
}

}  // namespace

extern "C" {

// opencl: path of Intel's OpenCL library for CPUs. The OpenCL loader reads it from the environment at its first use.
// cache: a folder for compiled kernels, which the SYCL runtime finds again by their source, options and device.
int optimus_sycl_open(const char* kernel_folder, const char* opencl, const char* cache, void** runtime, char* message,
                      size_t size) {
  return guarded(message, size, [&] {
    setenv("OCL_ICD_FILENAMES", opencl, 1);
    setenv("SYCL_CACHE_PERSISTENT", "1", 1);
    setenv("SYCL_CACHE_DIR", cache, 1);
    auto made = std::make_unique<Runtime>(kernel_folder);
    copy(made->device(), message, size);
    *runtime = made.release();
  });
}

int optimus_sycl_configure(void* runtime, int64_t group_items, int64_t block_slots, int64_t tile,
                           int64_t check_contents, char* message, size_t size) {
  return guarded(message, size, [&] {
    static_cast<Runtime*>(runtime)->configure(group_items, block_slots, tile, check_contents != 0);
  });
}

int optimus_sycl_run(void* runtime, const char* operation, const optimus::Array* arguments, size_t num_arguments,
                     char* message, size_t size) {
  return guarded(message, size, [&] {
    static_cast<Runtime*>(runtime)->run(operation, std::vector<optimus::Array>(arguments, arguments + num_arguments));
  });
}

}  // extern "C"
