// ExpertRuntime's long prompts: staging layers ahead, and what stays staged afterwards.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "cache/expert_runtime.h"

namespace glm53 {

void ExpertRuntime::begin_prompt(std::size_t stage_bytes, StreamHandle compute, StreamHandle copy, int layers) {
    if (in_prompt()) throw std::logic_error("ExpertRuntime: a long prompt is running already");
    if (layers < 0 || layers > config_.clock.layers) {
        throw std::invalid_argument("ExpertRuntime: a pass through " + std::to_string(layers) + " layers of " +
                                    std::to_string(config_.clock.layers));
    }
    const std::size_t experts = std::min<std::size_t>(stage_bytes / cache_->slot_bytes(), config_.clock.experts);
    const std::size_t bytes = std::max<std::size_t>(experts, 1) * cache_->slot_bytes();
    download(compute);
    unstage_kept(compute);
    if (!staging_ || staging_->bytes_each() != bytes) {
        staging_.reset();
        staging_ = std::make_unique<StagingBuffers>(device_, bytes);
    }
    compute_ = compute;
    copy_ = copy;
    entered_ = -1;
    queued_ = 0;
    pass_layers_ = layers ? layers : config_.clock.layers;
    feeder_ = std::make_unique<StageFeeder>(device_, *staging_, copy);
    try {
        queue_layer(0);
        if (pass_layers_ > 1) queue_layer(1);
    } catch (...) {
        feeder_.reset();
        throw;
    }
    totals_.long_prompts += 1;
}

// Missing experts in ascending order, as far as a buffer has room; one a piece: 9 MB fill the link, and what the
// forward pass itself copies to the device waits for as few of them as possible.
void ExpertRuntime::queue_layer(int layer) {
    std::vector<StagePiece> pieces;
    const std::size_t room = staging_->bytes_each() / cache_->slot_bytes();
    for (int e = 0; e < config_.clock.experts && pieces.size() < room; ++e) {
        if (cache_->slot_of(layer, e) >= 0) continue;
        pieces.push_back({reinterpret_cast<const void*>(home(layer, e)), cache_->slot_bytes()});
    }
    feeder_->queue(layer, std::move(pieces));
    queued_ = layer + 1;
}

void ExpertRuntime::note_staged(int layer, const std::vector<StagePiece>& pieces) {
    for (const StagePiece& piece : pieces) {
        if (!piece.at) continue;
        const std::uint64_t offset = reinterpret_cast<std::uint64_t>(piece.from) - layers_[layer].home;
        away(layer, static_cast<int>(offset / cache_->slot_bytes())) = reinterpret_cast<std::uint64_t>(piece.at);
        totals_.staged_bytes += piece.bytes;
        totals_.staged_experts += 1;
    }
}

void ExpertRuntime::enter_layer(int layer, const std::int64_t* picks, int n, int rows) {
    if (!in_prompt() || layer != entered_ + 1) {
        throw std::logic_error("ExpertRuntime: layer " + std::to_string(layer) + " entered after " +
                               std::to_string(entered_));
    }
    check_layer(layer);
    if (layer > 0) feeder_->release(layer - 1, compute_);
    if (layer == queued_) queue_layer(layer);  // the pass goes further than was said: nothing is ahead of it any more
    note_staged(layer, feeder_->acquire(layer, compute_));
    entered_ = layer;
    image(kStaged, layer);
    write_tables(kStaged, layer, compute_);
    prompt(layer, picks, n, rows, compute_);
    if (layer > 0 && layer + 1 < pass_layers_) queue_layer(layer + 1);
}

std::uint64_t ExpertRuntime::expert_address(int layer, int expert) const {
    check_layer(layer);
    if (expert < 0 || expert >= config_.clock.experts) {
        throw std::out_of_range("ExpertRuntime: no expert " + std::to_string(expert));
    }
    if (!in_prompt()) throw std::logic_error("ExpertRuntime: experts move outside of a long prompt");
    return found(layer, expert);
}

void ExpertRuntime::finish_prompt() {
    if (!in_prompt()) return;
    feeder_->stop(compute_);
    feeder_.reset();
    const bool whole = queued_ == entered_ + 1;  // else the buffers were being filled for later layers
    for (int layer = 0; layer <= entered_; ++layer) {
        if (whole && layer > entered_ - StagingBuffers::kBuffers) {
            kept_.push_back(layer);
        } else {
            unstage(layer, compute_);
        }
    }
}

void ExpertRuntime::unstage(int layer, StreamHandle compute) {
    for (int e = 0; e < config_.clock.experts; ++e) away(layer, e) = home(layer, e);
    image(kRestored, layer);
    write_tables(kRestored, layer, compute);
}

// Before the buffers are overwritten or freed; the policy state is downloaded. What was queued before may read them: it
// is waited for.
void ExpertRuntime::unstage_kept(StreamHandle compute) {
    if (kept_.empty()) return;
    device_->stream_synchronize(compute);
    for (const int layer : kept_) unstage(layer, compute);
    kept_.clear();
}

void ExpertRuntime::free_staging() {
    if (in_prompt()) throw std::logic_error("ExpertRuntime: the staging buffers are in use");
    if (!staging_) return;
    if (!kept_.empty()) download(compute_);
    unstage_kept(compute_);
    device_->stream_synchronize(compute_);
    device_->stream_synchronize(copy_);
    staging_.reset();
}

}  // namespace glm53
