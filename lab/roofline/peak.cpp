// What one core does at best: reading memory, and products that never leave its registers.
//
// Built by ceilings.py for the machine that it runs on. Each peak_* function runs `rounds` rounds and returns
// the operations of one round (a multiplication and an addition are two); 0 where the machine lacks the
// instruction.
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int kSums = 20;  // independent sums: more than an instruction's latency times its rate, fewer than registers

volatile float sink;

#if defined(__AVX512F__)
float last(const __m512 *sums) {
    __m512 total = sums[0];
    for (int i = 1; i < kSums; i++) total = _mm512_add_ps(total, sums[i]);
    return _mm512_reduce_add_ps(total);
}
#endif

}  // namespace

extern "C" {

// A sum over all of `bytes` (a multiple of 256) so that no load can be left out.
int64_t read_memory(const void *from, int64_t bytes) {
#if defined(__AVX512F__)
    auto *at = static_cast<const __m512i *>(from);
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (int64_t i = 0; i < bytes / 64; i += 4, at += 4) {
        __builtin_prefetch(reinterpret_cast<const char *>(at) + 4096);
        __builtin_prefetch(reinterpret_cast<const char *>(at) + 4160);
        __builtin_prefetch(reinterpret_cast<const char *>(at) + 4224);
        __builtin_prefetch(reinterpret_cast<const char *>(at) + 4288);
        a = _mm512_add_epi64(a, _mm512_loadu_si512(at));
        b = _mm512_add_epi64(b, _mm512_loadu_si512(at + 1));
        c = _mm512_add_epi64(c, _mm512_loadu_si512(at + 2));
        d = _mm512_add_epi64(d, _mm512_loadu_si512(at + 3));
    }
    return _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d)));
#else
    auto *at = static_cast<const int64_t *>(from);
    int64_t sums[8] = {};
    for (int64_t i = 0; i < bytes / 8; i += 8) {
        for (int j = 0; j < 8; j++) sums[j] += at[i + j];
    }
    int64_t total = 0;
    for (int64_t one : sums) total += one;
    return total;
#endif
}

int64_t peak_fp32(int64_t rounds) {
#if defined(__AVX512F__)
    __m512 sums[kSums], x = _mm512_set1_ps(sink), y = _mm512_set1_ps(sink);
    for (auto &sum : sums) sum = _mm512_setzero_ps();
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 20
        for (int i = 0; i < kSums; i++) sums[i] = _mm512_fmadd_ps(x, y, sums[i]);
    }
    sink = last(sums);
    return kSums * 16 * 2;
#elif defined(__AVX2__) && defined(__FMA__)
    constexpr int kFew = 12;
    __m256 sums[kFew], x = _mm256_set1_ps(sink), y = _mm256_set1_ps(sink);
    for (auto &sum : sums) sum = _mm256_setzero_ps();
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < kFew; i++) sums[i] = _mm256_fmadd_ps(x, y, sums[i]);
    }
    __m256 total = sums[0];
    for (int i = 1; i < kFew; i++) total = _mm256_add_ps(total, sums[i]);
    sink = _mm256_cvtss_f32(total);
    return kFew * 8 * 2;
#else
    (void)rounds;
    return 0;
#endif
}

int64_t peak_bf16(int64_t rounds) {
#if defined(__AVX512BF16__)
    __m512 sums[kSums];
    __m512bh x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(sink), _mm512_set1_ps(sink)), y = x;
    for (auto &sum : sums) sum = _mm512_setzero_ps();
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 20
        for (int i = 0; i < kSums; i++) sums[i] = _mm512_dpbf16_ps(sums[i], x, y);
    }
    sink = last(sums);
    return kSums * 32 * 2;
#else
    (void)rounds;
    return 0;
#endif
}

int64_t peak_int8(int64_t rounds) {
#if defined(__AVX512VNNI__)
    __m512i sums[kSums], x = _mm512_set1_epi8(static_cast<char>(sink)), y = x;
    for (auto &sum : sums) sum = _mm512_setzero_si512();
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 20
        for (int i = 0; i < kSums; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], x, y);
    }
    __m512i total = sums[0];
    for (int i = 1; i < kSums; i++) total = _mm512_add_epi32(total, sums[i]);
    sink = static_cast<float>(_mm512_reduce_add_epi32(total));
    return kSums * 64 * 2;
#else
    (void)rounds;
    return 0;
#endif
}
}
