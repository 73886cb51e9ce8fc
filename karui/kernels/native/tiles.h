// AMX: whether this process may use the processor's tile registers, and the shapes a thread gives them.
#pragma once
#ifdef __AMX_TILE__
#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tiles {

// The kernel must be asked once per process.
static inline bool allowed() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return granted;
}

struct alignas(64) Shapes {  // of the 8 registers
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // a row
    uint8_t rows[16] = {};
    void set(int tile, int r, int b) { rows[tile] = (uint8_t)r; bytes[tile] = (uint16_t)b; }
};

struct Configured {  // for as long as one of these lives in a thread
    explicit Configured(const Shapes& shapes) { _tile_loadconfig(&shapes); }
    ~Configured() { _tile_release(); }
};

}  // namespace tiles
#endif
