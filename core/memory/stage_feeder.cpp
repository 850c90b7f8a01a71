#include "memory/stage_feeder.h"

#include <algorithm>
#include <chrono>
#include <string>

namespace glm53 {
namespace {

constexpr auto kPoll = std::chrono::microseconds(20);  // against 180 us a piece, two queued: the link never runs dry

}  // namespace

StageFeeder::StageFeeder(std::shared_ptr<Device> device, StagingBuffers& staging, StreamHandle copy_stream,
                         int in_flight)
    : device_(std::move(device)), staging_(staging), copy_(copy_stream) {
    if (in_flight < 1) throw std::invalid_argument("StageFeeder: in_flight must be at least 1");
    try {
        for (int i = 0; i < in_flight; ++i) issued_.push_back(device_->event_create());
        thread_ = std::thread([this] { run(); });
    } catch (...) {
        for (EventHandle event : issued_) device_->event_destroy(event);
        throw;
    }
}

StageFeeder::~StageFeeder() {
    stop(nullptr);
    for (EventHandle event : issued_) device_->event_destroy(event);
}

void StageFeeder::queue(int layer, std::vector<StagePiece> pieces) {
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    if (!staging_.begin(layer, copy_)) {
        throw StagingError("staging: no buffer is free for layer " + std::to_string(layer));
    }
    auto task = std::make_unique<Task>();
    task->layer = layer;
    task->pieces = std::move(pieces);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
}

std::vector<StagePiece> StageFeeder::acquire(int layer, StreamHandle compute_stream) {
    std::unique_lock lock(mutex_);
    if (tasks_.empty() || tasks_.front()->layer != layer) {
        throw StagingError("staging: layer " + std::to_string(layer) + " is not the next one that was queued");
    }
    changed_.wait(lock, [&] { return tasks_.front()->brought || error_ || stopping_; });
    if (error_) std::rethrow_exception(error_);
    if (!tasks_.front()->brought) throw StagingError("staging: stopped");
    staging_.acquire(layer, compute_stream);
    std::vector<StagePiece> pieces = std::move(tasks_.front()->pieces);
    tasks_.pop_front();
    in_use_.push_back(layer);
    return pieces;
}

void StageFeeder::release(int layer, StreamHandle compute_stream) {
    const std::lock_guard lock(mutex_);
    staging_.release(layer, compute_stream);
    std::erase(in_use_, layer);
}

void StageFeeder::stop(StreamHandle compute_stream) noexcept {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
    try {
        for (const int layer : in_use_) staging_.release(layer, compute_stream);
        for (const auto& task : tasks_) staging_.cancel(task->layer);
    } catch (const std::exception&) {  // a device that is gone: nothing reads the buffers any more
    }
    in_use_.clear();
    tasks_.clear();
}

void StageFeeder::run() {
    std::unique_lock lock(mutex_);
    try {
        while (true) {
            const auto next = [this] {
                return std::ranges::find_if(tasks_, [](const auto& task) { return !task->brought; });
            };
            changed_.wait(lock, [&] { return stopping_ || next() != tasks_.end(); });
            if (stopping_) return;
            bring(lock, **next());
            changed_.notify_all();
        }
    } catch (...) {
        if (!lock.owns_lock()) lock.lock();
        error_ = std::current_exception();
        changed_.notify_all();
    }
}

void StageFeeder::bring(std::unique_lock<std::mutex>& lock, Task& task) {
    for (StagePiece& piece : task.pieces) {
        throttle(lock);
        if (stopping_) return;
        piece.at = staging_.copy(task.layer, piece.from, piece.bytes);
        if (!piece.at) continue;
        device_->event_record(issued_[turn_], copy_);
        turn_ = (turn_ + 1) % issued_.size();
    }
    staging_.commit(task.layer);
    task.brought = true;
}

// Until the oldest piece in flight has arrived. The task stays in the list meanwhile: only `stop`, after the thread has
// ended, and `acquire`, once it is brought, take it out.
void StageFeeder::throttle(std::unique_lock<std::mutex>& lock) {
    while (!stopping_ && !device_->event_query(issued_[turn_])) {
        lock.unlock();
        std::this_thread::sleep_for(kPoll);
        lock.lock();
    }
}

}  // namespace glm53
