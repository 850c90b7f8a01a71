// One exact-size block of host memory that holds a layer's expert tensors: mapped, filled once, then read-only.
//
// States    Empty    mapped, nothing written                          constructor
//           Filling  being written by any number of threads           the first read_file or write
//           Sealed   read-only for the CPU (mprotect), for good       seal
//           A write after seal, or past a failed read, throws ArenaError; there is no way back to Filling.
// Threads   reserve, read_file, write: any thread, disjoint ranges are the caller's duty (reserve hands them out).
//           seal: one thread, after every writer returned; a writer still inside makes it throw.
// Costs     mapping: virtual until touched. With a device all pages are made first, which zeroes them, on the calling
//           thread and side by side with other arenas', for registration does it one after the other under the driver's
//           lock; then it is 0.03 s/GiB on huge pages, 0.13 on 4 KiB ones.
//           read_file, read_files: pread straight into the arena, no second copy; the file's bytes also pass the page
//           cache.
//           stats reads /proc/self/smaps (milliseconds): not for a hot path.
// Lifetime  the device is kept alive; the block is unpinned, then unmapped, in the destructor, which never throws.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "device/device.h"

namespace glm53 {

struct ArenaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class ArenaState : int { Empty = 0, Filling = 1, Sealed = 2 };

// What tells that a file is still the one whose header was parsed.
struct FileVersion {
    std::uint64_t bytes = 0;
    std::int64_t mtime_ns = 0;  // as Python's os.stat().st_mtime_ns
    bool operator==(const FileVersion&) const = default;
};

// A range of one of the files of a read_files call, and where it goes.
struct FilePiece {
    std::size_t file = 0;
    std::uint64_t file_offset = 0;
    std::size_t arena_offset = 0, bytes = 0;
};

struct FileSource {
    std::string path;
    std::optional<FileVersion> expected;
};

// Seconds of the calling threads.
struct ArenaTimes {
    double populate_s = 0;  // making and zeroing the pages
    double pin_s = 0;
    double read_s = 0;
};

struct ArenaStats {
    std::size_t bytes = 0;           // as asked for
    std::size_t mapped_bytes = 0;    // rounded up to 2 MiB
    std::size_t read_bytes = 0;      // written so far by read_file and write
    std::size_t resident_bytes = 0;  // in RAM now
    std::size_t huge_bytes = 0;      // of them on huge pages
    std::size_t pinned_bytes = 0;
    ArenaState state = ArenaState::Empty;
};

class HostArena {
  public:
    static constexpr std::size_t kTensorAlign = 256;

    // Maps `bytes` (> 0), 2 MiB-aligned, and page-locks them when a device is given. ArenaError when the system has no
    // room, DeviceFailure when page-locking fails; nothing stays mapped then.
    HostArena(std::size_t bytes, std::string name, std::shared_ptr<Device> device = nullptr);
    ~HostArena();
    HostArena(const HostArena&) = delete;
    HostArena& operator=(const HostArena&) = delete;

    const std::string& name() const { return name_; }
    std::size_t bytes() const { return bytes_; }
    std::byte* data() const { return data_; }
    void* device_address() const { return device_address_; }  // nullptr when not pinned
    ArenaState state() const { return static_cast<ArenaState>(state_.load(std::memory_order_acquire)); }

    // Offset of `bytes` nobody else gets, kTensorAlign-aligned. ArenaError when the arena is full.
    std::size_t reserve(std::size_t bytes);

    // Reads file bytes [file_offset, + bytes) to arena_offset. ArenaError naming path and offsets for a file that
    // cannot be opened, ends early, or whose version differs from `expected` (if given) or between before and after the
    // read.
    void read_file(const std::string& path, std::uint64_t file_offset, std::size_t arena_offset, std::size_t bytes,
                   std::optional<FileVersion> expected = std::nullopt);
    // The same for many ranges; each file is opened once and its version checked before and after all of its ranges.
    // Pieces are read in the order given: sort them by file and offset.
    void read_files(std::span<const FileSource> files, std::span<const FilePiece> pieces);
    void write(std::size_t arena_offset, const void* src, std::size_t bytes);

    void seal();

    // Checked address of [offset, offset + bytes) for readers.
    const std::byte* view(std::size_t offset, std::size_t bytes) const;
    ArenaStats stats() const;
    ArenaTimes times() const;

  private:
    class WriteScope;  // counts a writer in and out

    void check_range(std::size_t offset, std::size_t bytes) const;

    const std::string name_;
    const std::size_t bytes_;
    const std::size_t mapped_bytes_;
    const std::shared_ptr<Device> device_;
    std::byte* data_ = nullptr;
    void* device_address_ = nullptr;

    mutable std::mutex mutex_;  // writers_, failed_ and every change of state_
    int writers_ = 0;
    bool failed_ = false;
    std::atomic<int> state_{0};
    std::atomic<std::size_t> reserved_{0};
    std::atomic<std::size_t> read_bytes_{0};
    std::atomic<std::int64_t> read_ns_{0};
    double populate_s_ = 0, pin_s_ = 0;
};

}  // namespace glm53
