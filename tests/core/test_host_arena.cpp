// HostArena: states, exact reads and what goes wrong with files, with and without page-locking.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "common/bytes.h"
#include "memory/host_arena.h"

using namespace glm53;

namespace {

struct TempFile {
    std::filesystem::path path;
    explicit TempFile(std::size_t bytes) {
        std::string name = (std::filesystem::temp_directory_path() / "glm53-arena-XXXXXX").string();
        close(mkstemp(name.data()));
        path = name;
        std::ofstream out(path, std::ios::binary);
        for (std::size_t i = 0; i < bytes; ++i) out.put(static_cast<char>(i * 31 + i / 251));
    }
    ~TempFile() { std::filesystem::remove(path); }
    char at(std::size_t i) const { return static_cast<char>(i * 31 + i / 251); }
};

}  // namespace

TEST_CASE("an arena goes from Empty over Filling to Sealed, for good") {
    HostArena arena(10'000, "layer 3");
    CHECK(arena.state() == ArenaState::Empty);
    CHECK(reinterpret_cast<std::uintptr_t>(arena.data()) % kHugePageBytes == 0);
    CHECK(arena.device_address() == nullptr);
    const int value = 42;
    arena.write(9'996, &value, 4);
    CHECK(arena.state() == ArenaState::Filling);
    arena.seal();
    arena.seal();
    CHECK(arena.state() == ArenaState::Sealed);
    CHECK_THROWS_WITH_AS(arena.write(0, &value, 4), "arena 'layer 3' is sealed: read-only", ArenaError);
    CHECK(std::memcmp(arena.view(9'996, 4), &value, 4) == 0);
    const ArenaStats stats = arena.stats();
    CHECK(stats.bytes == 10'000);
    CHECK(stats.mapped_bytes == kHugePageBytes);
    CHECK(stats.read_bytes == 4);
    CHECK(stats.resident_bytes >= 4096);
    CHECK(stats.resident_bytes <= kHugePageBytes);
    CHECK(stats.huge_bytes <= stats.resident_bytes);
    CHECK(stats.pinned_bytes == 0);
}

TEST_CASE("nothing can store into a sealed arena") {
    HostArena arena(4096, "sealed");
    const int zero = open("/dev/zero", O_RDONLY);
    CHECK(read(zero, arena.data(), 1) == 1);
    arena.seal();
    CHECK(read(zero, arena.data(), 1) == -1);
    CHECK(errno == EFAULT);
    close(zero);
}

TEST_CASE("behind an arena nothing can be read or written: an overrun never meets the next one") {
    const HostArena arena(4096, "alone");
    const int zero = open("/dev/zero", O_RDONLY);
    CHECK(read(zero, arena.data() + kHugePageBytes - 1, 1) == 1);
    CHECK(read(zero, arena.data() + kHugePageBytes, 1) == -1);
    CHECK(errno == EFAULT);
    close(zero);
}

#if !defined(__SANITIZE_THREAD__)  // its runtime maps memory of its own in a child, into the very hole
TEST_CASE("a child process does not get the arena's pages") {
    HostArena arena(4096, "mine");
    const int one = 1;
    arena.write(0, &one, sizeof one);
    unsigned char resident = 0;
    REQUIRE(mincore(arena.data(), 4096, &resident) == 0);
    const pid_t child = fork();
    if (child == 0) _exit(mincore(arena.data(), 4096, &resident) == -1 && errno == ENOMEM ? 0 : 1);
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
}
#endif

TEST_CASE("a page-locked arena has all its pages from the start") {
    HostArena arena(3 * kHugePageBytes + 5, "pinned", make_host_device());
    const ArenaTimes made = arena.times();
    CHECK(made.populate_s >= 0);
    CHECK(made.read_s == 0);
    if (madvise(arena.data(), 4096, 23) != 0) return;  // a kernel before 5.14 leaves it to page-locking
    CHECK(arena.stats().resident_bytes == 4 * kHugePageBytes);
    CHECK(made.populate_s > 0);
}

TEST_CASE("many ranges of several files in one call") {
    const TempFile a(9'000), b(500);
    const auto version = [](const TempFile& f) {
        struct stat s{};
        stat(f.path.c_str(), &s);
        return FileVersion{static_cast<std::uint64_t>(s.st_size), s.st_mtim.tv_sec * 1'000'000'000 + s.st_mtim.tv_nsec};
    };
    const std::vector<FileSource> files{{a.path, version(a)}, {b.path, version(b)}};
    HostArena arena(4096, "layer");
    const std::vector<FilePiece> pieces{{0, 8'000, 0, 1'000}, {1, 7, 3'000, 300}, {0, 10, 2'000, 50}};
    arena.read_files(files, pieces);
    for (const FilePiece& p : pieces) {
        const TempFile& from = p.file ? b : a;
        for (std::size_t i = 0; i < p.bytes; ++i) {
            REQUIRE(static_cast<char>(arena.data()[p.arena_offset + i]) == from.at(p.file_offset + i));
        }
    }
    CHECK(arena.stats().read_bytes == 1'350);
    CHECK(arena.times().read_s > 0);

    const std::vector<FilePiece> outside{{0, 0, 4'000, 97}}, nowhere{{2, 0, 0, 1}};
    CHECK_THROWS_WITH_AS(arena.read_files(files, outside), doctest::Contains("are outside its 4096"), ArenaError);
    CHECK_THROWS_WITH_AS(arena.read_files(files, nowhere), doctest::Contains("of no file"), ArenaError);
    arena.read_files(files, pieces);  // a call refused beforehand has spoiled nothing
    std::vector<FileSource> older = files;
    older[1].expected->mtime_ns -= 1;
    CHECK_THROWS_WITH_AS(arena.read_files(older, pieces), doctest::Contains("changed since its header was read"),
                         ArenaError);
    CHECK_THROWS_AS(arena.seal(), ArenaError);
}

TEST_CASE("neighbouring arenas are counted apart") {
    HostArena a(kHugePageBytes, "a"), b(kHugePageBytes, "b");
    std::vector<char> ones(kHugePageBytes, 1);
    a.write(0, ones.data(), ones.size());
    CHECK(a.stats().resident_bytes == kHugePageBytes);
    CHECK(b.stats().resident_bytes == 0);
}

TEST_CASE("reserve hands out aligned, disjoint ranges until the arena is full") {
    HostArena arena(1024, "small");
    CHECK(arena.reserve(1) == 0);
    CHECK(arena.reserve(256) == 256);
    CHECK(arena.reserve(512) == 512);
    CHECK(arena.reserve(0) == 1024);
    CHECK_THROWS_WITH_AS(arena.reserve(1), doctest::Contains("bytes 1024 + 1 are outside its 1024"), ArenaError);
    CHECK_THROWS_AS(arena.view(1000, 25), ArenaError);
    CHECK_THROWS_AS(arena.view(static_cast<std::size_t>(-1), 2), ArenaError);
    CHECK_THROWS_AS(HostArena(0, "none"), ArenaError);
    CHECK_THROWS_AS(HostArena(static_cast<std::size_t>(-1), "wraps"), ArenaError);
    CHECK_THROWS_AS(HostArena(std::size_t{1} << 60, "huge"), ArenaError);
}

TEST_CASE("read_file is exact, also from many threads") {
    constexpr std::size_t kBytes = 1'000'003;
    const TempFile file(kBytes);
    HostArena arena(kBytes, "file");
    std::vector<std::thread> threads;
    constexpr std::size_t kThreads = 4, kPiece = kBytes / kThreads + 1;
    for (std::size_t t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
            const std::size_t begin = t * kPiece;
            arena.read_file(file.path, begin, begin, std::min(kPiece, kBytes - begin));
        });
    }
    for (auto& thread : threads) thread.join();
    arena.seal();
    CHECK(arena.stats().read_bytes == kBytes);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < kBytes; ++i) wrong += static_cast<char>(arena.view(i, 1)[0]) != file.at(i);
    CHECK(wrong == 0);
}

TEST_CASE("a failed read names the file and leaves an arena that cannot be sealed") {
    const TempFile file(100);
    HostArena arena(200, "broken");
    SUBCASE("the file ends early") {
        CHECK_THROWS_WITH_AS(arena.read_file(file.path, 50, 0, 51),
                             doctest::Contains("ends at byte 100, 51 bytes from 50 were asked"), ArenaError);
    }
    SUBCASE("no such file") {
        CHECK_THROWS_WITH_AS(arena.read_file("/nonexistent/x", 0, 0, 1),
                             "cannot open '/nonexistent/x': No such file or directory", ArenaError);
    }
    SUBCASE("not a file") {
        CHECK_THROWS_WITH_AS(arena.read_file("/", 0, 0, 1), doctest::Contains("'/'"), ArenaError);
    }
    CHECK_THROWS_WITH_AS(arena.seal(), doctest::Contains("incomplete"), ArenaError);
    CHECK_THROWS_WITH_AS(arena.read_file(file.path, 0, 0, 10), doctest::Contains("incomplete"), ArenaError);
}

TEST_CASE("a range outside the arena is refused before anything is read and does no harm") {
    const TempFile file(100);
    HostArena arena(64, "tight");
    CHECK_THROWS_AS(arena.read_file(file.path, 0, 60, 5), ArenaError);
    CHECK(arena.state() == ArenaState::Empty);
    arena.read_file(file.path, 36, 0, 64);
    arena.seal();
    CHECK(static_cast<char>(arena.view(63, 1)[0]) == file.at(99));
}

TEST_CASE("a file of another version than its header's is refused") {
    const TempFile file(100);
    struct stat status{};
    REQUIRE(stat(file.path.c_str(), &status) == 0);
    const std::int64_t mtime = status.st_mtim.tv_sec * 1'000'000'000LL + status.st_mtim.tv_nsec;
    HostArena arena(4096, "versions");
    arena.read_file(file.path, 0, 0, 100, FileVersion{100, mtime});
    SUBCASE("mtime") {
        CHECK_THROWS_AS(arena.read_file(file.path, 0, 0, 1, FileVersion{100, mtime - 1}), ArenaError);
    }
    SUBCASE("size") {
        CHECK_THROWS_WITH_AS(arena.read_file(file.path, 0, 0, 1, FileVersion{99, mtime}),
                             doctest::Contains("changed since its header was read"), ArenaError);
    }
}

TEST_CASE("a file that changes during a read is refused") {
    constexpr std::size_t kBytes = 1 << 20;
    const TempFile file(kBytes);
    std::atomic<bool> stop{false};
    std::thread touch([&] {
        while (!stop) std::filesystem::last_write_time(file.path, std::filesystem::file_time_type::clock::now());
    });
    std::string message;
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (message.empty() && std::chrono::steady_clock::now() < give_up) {
        HostArena arena(kBytes, "changing");  // one read each: a refused one ends the arena
        try {
            arena.read_file(file.path, 0, 0, kBytes);
        } catch (const ArenaError& error) {
            message = error.what();
        }
    }
    stop = true;
    touch.join();
    CHECK(message.find("changed while it was read") != std::string::npos);
}

TEST_CASE("page-locking covers the mapping, ends with the arena, and its failure is loud") {
    const auto device = make_host_device(1 << 20, kHugePageBytes);
    {
        HostArena arena(3 * kHugePageBytes + 1, "locked", device);
        CHECK(arena.device_address() == arena.data());
        CHECK(device->pin_chunks() == 4);
        CHECK(arena.stats().pinned_bytes == 4 * kHugePageBytes);
    }
    CHECK(device->pin_chunks() == 0);
    device->fail_pin_after(2);
    CHECK_THROWS_WITH_AS(HostArena(3 * kHugePageBytes, "refused", device),
                         doctest::Contains("arena 'refused': page-locking 6.29 MB failed"), DeviceFailure);
    CHECK(device->pin_chunks() == 0);
}
