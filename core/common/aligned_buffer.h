// AlignedBuffer: scratch memory that only grows. Not initialised: the thread that writes a page first gets it on its
// own memory node. Costs: one allocation whenever a larger size than ever before is asked for; contents are then lost.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

namespace glm53 {

template <class T>
class AlignedBuffer {
    static_assert(std::is_trivially_copyable_v<T>);

  public:
    static constexpr size_t kAlignment = 64;

    // Room for `count` elements at data(). Throws std::bad_alloc.
    void reserve(size_t count) {
        if (count <= capacity_) return;
        data_.reset();
        capacity_ = 0;
        const size_t bytes = (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
        data_.reset(static_cast<T*>(std::aligned_alloc(kAlignment, bytes)));
        if (!data_) throw std::bad_alloc();
        capacity_ = count;
    }
    T* data() const { return data_.get(); }

  private:
    struct Free {
        void operator()(T* pointer) const { std::free(pointer); }
    };
    std::unique_ptr<T, Free> data_;
    size_t capacity_ = 0;
};

}  // namespace glm53
