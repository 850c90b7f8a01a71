// relax(): what a thread does in a loop that waits for another one.
#pragma once

namespace glm53 {

// Leaves the core to its other hyperthread for 40 to 140 cycles. Nothing where the processor has no such instruction.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace glm53
