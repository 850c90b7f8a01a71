#include "memory/host_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "common/bytes.h"

namespace glm53 {
namespace {

std::string errno_text(int error) {
    return std::string(std::strerror(error));
}

// The page after the block is never accessible: it stops overruns, and keeps the kernel from merging neighbouring
// arenas into one mapping, whose lines in smaps would then count them all.
constexpr std::size_t kGuardBytes = 4096;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// An anonymous mapping whose start is 2 MiB-aligned: map more, return what sticks out on both sides.
std::byte* map_aligned(std::size_t bytes, const std::string& name) {
    const std::size_t room = bytes + kGuardBytes + kHugePageBytes;
    void* raw = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) {
        throw ArenaError("arena '" + name + "': mapping " + bytes_text(bytes) + " failed: " + errno_text(errno));
    }
    const auto start = reinterpret_cast<std::uintptr_t>(raw);
    const std::uintptr_t aligned = align_up(start, kHugePageBytes);
    if (aligned > start) munmap(raw, aligned - start);
    const std::uintptr_t guard = aligned + bytes;
    const std::size_t tail = start + room - (guard + kGuardBytes);
    if (tail) munmap(reinterpret_cast<void*>(guard + kGuardBytes), tail);
    mprotect(reinterpret_cast<void*>(guard), kGuardBytes, PROT_NONE);
    auto* data = reinterpret_cast<std::byte*>(aligned);
    madvise(data, bytes, MADV_HUGEPAGE);  // refused where the kernel has none: 4 KiB pages work too
    madvise(data, bytes,
            MADV_DONTFORK);  // a child gets no page tables for it, and no copy-on-write parts it from its pins
    return data;
}

// Makes all pages of a block, which is a multiple of huge pages, one of those a call: the kernel holds the lock on the
// process' mappings for a whole call, and every other thread that maps memory (any large allocation) waits for it. A
// kernel that does not know or does not allow this leaves it to page-locking.
void populate(std::byte* data, std::size_t bytes, const std::string& name) {
    for (std::size_t at = 0; at < bytes; at += kHugePageBytes) {
        if (madvise(data + at, kHugePageBytes, kPopulateWrite) == 0) continue;
        if (errno != ENOMEM) return;
        throw ArenaError("arena '" + name + "': no room for " + bytes_text(bytes) + " in RAM: " + errno_text(errno));
    }
}

class File {
  public:
    explicit File(const std::string& path) : path_(path), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
        if (fd_ < 0) throw ArenaError("cannot open '" + path + "': " + errno_text(errno));
    }
    ~File() { close(fd_); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    FileVersion version() const {
        struct stat status{};
        if (fstat(fd_, &status) != 0) throw ArenaError("cannot stat '" + path_ + "': " + errno_text(errno));
        return {static_cast<std::uint64_t>(status.st_size),
                status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec};
    }

    void read(std::byte* dst, std::size_t bytes, std::uint64_t offset) const {
        std::size_t done = 0;
        while (done < bytes) {
            const ssize_t n = pread(fd_, dst + done, bytes - done, static_cast<off_t>(offset + done));
            if (n > 0) {
                done += static_cast<std::size_t>(n);
            } else if (n == 0) {
                throw ArenaError("'" + path_ + "' ends at byte " + std::to_string(offset + done) + ", " +
                                 std::to_string(bytes) + " bytes from " + std::to_string(offset) + " were asked");
            } else if (errno != EINTR) {
                throw ArenaError("reading '" + path_ + "' at byte " + std::to_string(offset + done) + ": " +
                                 errno_text(errno));
            }
        }
    }

  private:
    const std::string path_;
    const int fd_;
};

// Sums the kB lines `Rss` and `AnonHugePages` of the mappings that overlap [begin, end).
void add_smaps(std::uintptr_t begin, std::uintptr_t end, ArenaStats& stats) {
    std::ifstream smaps("/proc/self/smaps");
    std::string line;
    bool inside = false;
    while (std::getline(smaps, line)) {
        unsigned long low = 0, high = 0, kib = 0;
        if (std::sscanf(line.c_str(), "%lx-%lx ", &low, &high) == 2) {
            inside = low < end && high > begin;
        } else if (inside && std::sscanf(line.c_str(), "Rss: %lu kB", &kib) == 1) {
            stats.resident_bytes += kib << 10;
        } else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %lu kB", &kib) == 1) {
            stats.huge_bytes += kib << 10;
        }
    }
}

}  // namespace

class HostArena::WriteScope {
  public:
    WriteScope(HostArena& arena, std::size_t offset, std::size_t bytes) : arena_(arena) {
        arena.check_range(offset, bytes);
        const std::lock_guard lock(arena.mutex_);
        if (arena.state() == ArenaState::Sealed) throw ArenaError("arena '" + arena.name_ + "' is sealed: read-only");
        if (arena.failed_) throw ArenaError("arena '" + arena.name_ + "' is incomplete: an earlier read failed");
        arena.state_.store(static_cast<int>(ArenaState::Filling), std::memory_order_release);
        ++arena.writers_;
    }
    ~WriteScope() {
        const std::lock_guard lock(arena_.mutex_);
        --arena_.writers_;
        arena_.failed_ = arena_.failed_ || !done_;
    }
    WriteScope(const WriteScope&) = delete;
    WriteScope& operator=(const WriteScope&) = delete;

    void finish(std::size_t bytes) {
        arena_.read_bytes_.fetch_add(bytes, std::memory_order_relaxed);
        done_ = true;
    }

  private:
    HostArena& arena_;
    bool done_ = false;
};

HostArena::HostArena(std::size_t bytes, std::string name, std::shared_ptr<Device> device)
    : name_(std::move(name)),
      bytes_(bytes),
      mapped_bytes_(align_up(bytes, kHugePageBytes)),
      device_(std::move(device)) {
    if (bytes == 0) throw ArenaError("arena '" + name_ + "': 0 bytes asked");
    if (mapped_bytes_ < bytes) throw ArenaError("arena '" + name_ + "': " + std::to_string(bytes) + " bytes asked");
    data_ = map_aligned(mapped_bytes_, name_);
    if (!device_) return;
    try {
        const auto start = std::chrono::steady_clock::now();
        populate(data_, mapped_bytes_, name_);
        populate_s_ = seconds_since(start);
        device_address_ = device_->pin(data_, mapped_bytes_);
        pin_s_ = seconds_since(start) - populate_s_;
    } catch (const DeviceFailure& failure) {
        munmap(data_, mapped_bytes_ + kGuardBytes);
        throw DeviceFailure("arena '" + name_ + "': page-locking " + bytes_text(mapped_bytes_) +
                            " failed: " + failure.what());
    } catch (...) {
        munmap(data_, mapped_bytes_ + kGuardBytes);
        throw;
    }
}

HostArena::~HostArena() {
    if (device_) device_->unpin(data_);
    munmap(data_, mapped_bytes_ + kGuardBytes);
}

void HostArena::check_range(std::size_t offset, std::size_t bytes) const {
    if (offset > bytes_ || bytes > bytes_ - offset) {
        throw ArenaError("arena '" + name_ + "': bytes " + std::to_string(offset) + " + " + std::to_string(bytes) +
                         " are outside its " + std::to_string(bytes_));
    }
}

std::size_t HostArena::reserve(std::size_t bytes) {
    std::size_t used = reserved_.load(std::memory_order_relaxed);
    for (;;) {
        const std::size_t offset = align_up(used, kTensorAlign);
        check_range(offset, bytes);
        if (reserved_.compare_exchange_weak(used, offset + bytes, std::memory_order_relaxed)) return offset;
    }
}

void HostArena::read_file(const std::string& path, std::uint64_t file_offset, std::size_t arena_offset,
                          std::size_t bytes, std::optional<FileVersion> expected) {
    const FileSource source{path, expected};
    const FilePiece piece{0, file_offset, arena_offset, bytes};
    read_files({&source, 1}, {&piece, 1});
}

void HostArena::read_files(std::span<const FileSource> files, std::span<const FilePiece> pieces) {
    const auto start = std::chrono::steady_clock::now();
    std::size_t bytes = 0;
    for (const FilePiece& piece : pieces) {
        check_range(piece.arena_offset, piece.bytes);
        if (piece.file >= files.size()) throw ArenaError("arena '" + name_ + "': a piece of no file");
        bytes += piece.bytes;
    }
    WriteScope scope(*this, 0, bytes_);
    for (std::size_t f = 0; f < files.size(); ++f) {
        const File file(files[f].path);
        const FileVersion before = file.version();
        if (files[f].expected && before != *files[f].expected) {
            throw ArenaError("'" + files[f].path + "' changed since its header was read");
        }
        for (const FilePiece& piece : pieces) {
            if (piece.file == f) file.read(data_ + piece.arena_offset, piece.bytes, piece.file_offset);
        }
        if (file.version() != before) throw ArenaError("'" + files[f].path + "' changed while it was read");
    }
    read_ns_.fetch_add(static_cast<std::int64_t>(seconds_since(start) * 1e9), std::memory_order_relaxed);
    scope.finish(bytes);
}

void HostArena::write(std::size_t arena_offset, const void* src, std::size_t bytes) {
    WriteScope scope(*this, arena_offset, bytes);
    std::memcpy(data_ + arena_offset, src, bytes);
    scope.finish(bytes);
}

void HostArena::seal() {
    const std::lock_guard lock(mutex_);
    if (state() == ArenaState::Sealed) return;
    if (failed_) throw ArenaError("arena '" + name_ + "' is incomplete: an earlier read failed");
    if (writers_) throw ArenaError("arena '" + name_ + "': seal while " + std::to_string(writers_) + " writers are in");
    if (mprotect(data_, mapped_bytes_, PROT_READ) != 0) {
        throw ArenaError("arena '" + name_ + "': mprotect failed: " + errno_text(errno));
    }
    state_.store(static_cast<int>(ArenaState::Sealed), std::memory_order_release);
}

const std::byte* HostArena::view(std::size_t offset, std::size_t bytes) const {
    check_range(offset, bytes);
    return data_ + offset;
}

ArenaTimes HostArena::times() const {
    return {populate_s_, pin_s_, static_cast<double>(read_ns_.load(std::memory_order_relaxed)) * 1e-9};
}

ArenaStats HostArena::stats() const {
    ArenaStats stats;
    stats.bytes = bytes_;
    stats.mapped_bytes = mapped_bytes_;
    stats.read_bytes = read_bytes_.load(std::memory_order_relaxed);
    stats.pinned_bytes = device_ ? mapped_bytes_ : 0;
    stats.state = state();
    const auto begin = reinterpret_cast<std::uintptr_t>(data_);
    add_smaps(begin, begin + mapped_bytes_, stats);
    return stats;
}

}  // namespace glm53
