// Zeros that take memory once they are touched: a pool of keys and values that is large and
// mostly unused for long.
#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

ffi::Error Zeros(ffi::Result<ffi::AnyBuffer> out) {
  uint8_t* data = static_cast<uint8_t*>(out->untyped_data());
  uint8_t* const end = data + out->size_bytes();
#if defined(__linux__)
  // Pages that are given back come again as zeros: XLA's memory is private to the process.
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  uint8_t* const first = reinterpret_cast<uint8_t*>((uintptr_t(data) + page - 1) / page * page);
  uint8_t* const last = reinterpret_cast<uint8_t*>(uintptr_t(end) / page * page);
  if (first < last && madvise(first, size_t(last - first), MADV_DONTNEED) == 0) {
    std::memset(data, 0, size_t(first - data));
    data = last;
  }
#endif
  std::memset(data, 0, size_t(end - data));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_zeros, Zeros, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
