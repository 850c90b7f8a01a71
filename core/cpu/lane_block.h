// The memory that a publisher (a CUDA kernel, or a host thread: lane_publisher.h) and the CPU lane share: two job slots
// in page-locked memory that both sides map. Plain layout and atomics, so that CUDA code includes it too.
//
//   slot (job & 1)                                            written by   read by
//   0      published  u32 number of the job, own line         publisher    every worker
//   64     layer, rows, top_k                                 publisher    every worker
//   128    picks   (rows, top_k) int32, or kSkippedPick       publisher    every worker
//   384    weights (rows, top_k) float                        publisher    every worker
//   640    x       (8, hidden) float                          publisher    every worker
//   then   done    u64 verdict << 32 | job, own line          lane         publisher's side
//   then   result  (8, hidden) float                          lane         publisher's side
//
// Jobs are numbered 1, 2, 3, ... (wrapping after 2^32); job j lies in slot j & 1.
//
// Ordering
//  1. The publisher writes everything of slot j & 1, then `published` = j with release at system scope. A worker that
//     reads j with acquire sees the whole job. It is the last write of the publisher and the first read of a worker.
//  2. Every worker takes part in every job, also one that has no share in it. Each reads the slot, takes shares of the
//     work until none is left, and finishes (release). Blocks of `result` are written by whoever completes them.
//  3. The worker that finishes last has acquired all the others' writes. It alone writes `done` = (kOk, j), with
//     release, so whoever reads it with acquire sees the whole result.
//  4. Slot j & 1 is written again for job j + 2. The publisher does so only after it has read `done` of job j (and has
//     read the result): by 2 and 3 no worker reads or writes that slot any more. So at most two jobs are outstanding,
//     and `done` needs no clearing: it is compared with the number of the job.
//  5. kBadJob is decided as in 3, by all workers alike. kStalled and kDied end the lane: `done` = (verdict, j) is
//     written in place of 3, never besides it, for one compare-and-swap in the lane decides between them. The result
//     may then hold anything and must not be read; no later job is ever computed, each gets the same verdict. Once it
//     has read such a verdict the publisher writes into no slot again, for a stalled worker may still read there.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define GLM53_LANE_HD __host__ __device__ constexpr
#else
#define GLM53_LANE_HD constexpr
#endif

namespace glm53::cpu {

inline constexpr int kLaneRows = 8;    // the decode kernels' largest step
inline constexpr int kLanePicks = 64;  // rows * top_k at most
inline constexpr std::size_t kLaneLine = 64;
inline constexpr int kSkippedPick = -1;  // a pick that another lane serves: it adds nothing here

enum class LaneVerdict : std::uint32_t {
    kPending = 0,
    kOk = 1,
    kBadJob = 2,   // the job names a layer, a size or an expert that does not exist
    kStalled = 3,  // not finished within the limit
    kDied = 4,     // a worker threw, or the lane was closed with the job in it
};

struct LaneJob {
    std::uint32_t published;
    std::uint32_t pad_[15];
    std::int32_t layer, rows, top_k;
    std::int32_t reserved_[13];
    std::int32_t picks[kLanePicks];
    float weights[kLanePicks];
};
static_assert(offsetof(LaneJob, layer) == 64 && offsetof(LaneJob, picks) == 128 && offsetof(LaneJob, weights) == 384);
static_assert(sizeof(LaneJob) == 640 && sizeof(LaneJob) % kLaneLine == 0 && alignof(LaneJob) == 4);

struct LaneDone {
    std::uint64_t word;  // verdict << 32 | job
    std::uint64_t pad_[7];
};
static_assert(sizeof(LaneDone) == kLaneLine);

// Byte offsets within a block; hidden is a multiple of 128, so that everything begins on a line.
GLM53_LANE_HD std::size_t lane_row_bytes(int hidden) {
    return static_cast<std::size_t>(hidden) * sizeof(float);
}
GLM53_LANE_HD std::size_t lane_slot_bytes(int hidden) {
    return sizeof(LaneJob) + sizeof(LaneDone) + 2 * kLaneRows * lane_row_bytes(hidden);
}
GLM53_LANE_HD std::size_t lane_block_bytes(int hidden) {
    return 2 * lane_slot_bytes(hidden);
}
static_assert(lane_row_bytes(128) % kLaneLine == 0 && lane_slot_bytes(128) % kLaneLine == 0);
static_assert(lane_block_bytes(4096) == 2 * (640 + 64 + 2 * 131072));

struct LaneSlot {
    LaneJob* job;
    float* x;
    LaneDone* done;
    float* result;
};

// block: lane_block_bytes(hidden) bytes, 64-byte aligned.
#if defined(__CUDACC__)
__host__ __device__
#endif
    inline LaneSlot lane_slot(void* block, int hidden, std::uint32_t job) {
    char* base = static_cast<char*>(block) + (job & 1u) * lane_slot_bytes(hidden);
    const std::size_t x = sizeof(LaneJob), done = x + kLaneRows * lane_row_bytes(hidden);
    return {reinterpret_cast<LaneJob*>(base), reinterpret_cast<float*>(base + x),
            reinterpret_cast<LaneDone*>(base + done), reinterpret_cast<float*>(base + done + sizeof(LaneDone))};
}

// The number of the last job that was published in a block; a publisher that comes later goes on behind it.
inline std::uint32_t lane_last_job(void* block, int hidden) {
    const std::uint32_t even = lane_slot(block, hidden, 0).job->published;
    const std::uint32_t odd = lane_slot(block, hidden, 1).job->published;
    return static_cast<std::int32_t>(odd - even) > 0 ? odd : even;
}

GLM53_LANE_HD std::uint64_t lane_done_word(LaneVerdict verdict, std::uint32_t job) {
    return static_cast<std::uint64_t>(verdict) << 32 | job;
}
GLM53_LANE_HD LaneVerdict lane_verdict(std::uint64_t word, std::uint32_t job) {
    return static_cast<std::uint32_t>(word) == job ? static_cast<LaneVerdict>(word >> 32) : LaneVerdict::kPending;
}

// As people read it.
inline const char* lane_verdict_name(LaneVerdict verdict) {
    switch (verdict) {
        case LaneVerdict::kPending:
            return "pending";
        case LaneVerdict::kOk:
            return "ok";
        case LaneVerdict::kBadJob:
            return "bad job";
        case LaneVerdict::kStalled:
            return "stalled";
        case LaneVerdict::kDied:
            break;
    }
    return "died";
}

}  // namespace glm53::cpu
