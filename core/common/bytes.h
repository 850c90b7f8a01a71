// Sizes in bytes: rounding up to an alignment, and text for messages.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

namespace glm53 {

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// `alignment` is a power of two.
constexpr std::size_t align_up(std::size_t bytes, std::size_t alignment) {
    return (bytes + alignment - 1) & ~(alignment - 1);
}

// "2.73 GB": decimal units, as disks and vendors count.
inline std::string bytes_text(std::uint64_t bytes) {
    static constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB"};
    double value = static_cast<double>(bytes);
    int unit = 0;
    for (; value >= 1000.0 && unit < 4; ++unit) value /= 1000.0;
    char text[32];
    std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
    return text;
}

}  // namespace glm53
