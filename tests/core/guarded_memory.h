// Memory between two pages that fault on any access: a read or write one byte outside it ends the test.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

namespace glm53::test {

class GuardedMemory {
  public:
    enum class Flush { kStart, kEnd };  // which guard page the bytes touch

    GuardedMemory(size_t bytes, Flush flush) : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
        const size_t inner = (bytes + page_ - 1) / page_ * page_;
        total_ = inner + 2 * page_;
        void* map = mmap(nullptr, total_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (map == MAP_FAILED) throw std::bad_alloc();
        base_ = static_cast<uint8_t*>(map);
        if (mprotect(base_ + page_, inner, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
        data_ = base_ + page_ + (flush == Flush::kEnd ? inner - bytes : 0);
    }
    ~GuardedMemory() { munmap(base_, total_); }
    GuardedMemory(const GuardedMemory&) = delete;
    GuardedMemory& operator=(const GuardedMemory&) = delete;

    uint8_t* data() const { return data_; }

  private:
    size_t page_;
    size_t total_ = 0;
    uint8_t* base_ = nullptr;
    uint8_t* data_ = nullptr;
};

}  // namespace glm53::test
