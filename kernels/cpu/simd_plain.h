// Registers of 4 floats in the compiler's portable vector types: SSE2 or NEON, or plain loops elsewhere.
#pragma once

#include <cmath>

#include "bf16.h"

namespace diptych {
namespace {

constexpr int kLanes = 4;
constexpr int kGemmRows = 1;  // of 32 columns: 8 sums in 16 registers
constexpr int kSums = 12;  // that attention keeps beside each other

typedef float Lanes __attribute__((vector_size(16)));

inline Lanes splat(float x) { return Lanes{x, x, x, x}; }
inline Lanes load_part(const float *p, int n) {
    Lanes v = {};
    for (int i = 0; i < n; i++) v[i] = p[i];
    return v;
}
inline Lanes load(const float *p) {
    Lanes v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float *p, Lanes v) { std::memcpy(p, &v, sizeof v); }
inline void store_part(float *p, Lanes v, int n) {
    for (int i = 0; i < n; i++) p[i] = v[i];
}

inline Lanes load_part(const bf16 *p, int n) {
    Lanes v = {};
    for (int i = 0; i < n; i++) v[i] = to_float(p[i]);
    return v;
}
inline Lanes load(const bf16 *p) { return load_part(p, kLanes); }
inline void store_part(bf16 *p, Lanes v, int n) {
    for (int i = 0; i < n; i++) p[i] = to_bf16(v[i]);
}
inline void store(bf16 *p, Lanes v) { store_part(p, v, kLanes); }

inline Lanes load_part(const int8_t *p, int n) {
    Lanes v = {};
    for (int i = 0; i < n; i++) v[i] = static_cast<float>(p[i]);
    return v;
}
inline Lanes load(const int8_t *p) { return load_part(p, kLanes); }
// Whole numbers of -127 .. 127.
inline void store_part(int8_t *p, Lanes v, int n) {
    for (int i = 0; i < n; i++) p[i] = static_cast<int8_t>(v[i]);
}
inline void store(int8_t *p, Lanes v) { store_part(p, v, kLanes); }

inline Lanes load_even(const bf16 *p) {
    return Lanes{to_float(p[0]), to_float(p[2]), to_float(p[4]), to_float(p[6])};
}
inline Lanes load_odd(const bf16 *p) { return load_even(p + 1); }

// Numbers 0, 2, .. and 1, 3, .. of 8 put in order.
inline void interleave(Lanes &even, Lanes &odd) {
    Lanes first = {even[0], odd[0], even[1], odd[1]};
    odd = Lanes{even[2], odd[2], even[3], odd[3]};
    even = first;
}

inline Lanes add(Lanes a, Lanes b) { return a + b; }
inline Lanes sub(Lanes a, Lanes b) { return a - b; }
inline Lanes mul(Lanes a, Lanes b) { return a * b; }
inline Lanes div(Lanes a, Lanes b) { return a / b; }
// Two roundings: the build forbids the compiler to contract, so that all code paths round alike.
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return a * b + c; }
// The second operand where either is NaN.
inline Lanes max(Lanes a, Lanes b) { return a > b ? a : b; }
inline Lanes min(Lanes a, Lanes b) { return a < b ? a : b; }
inline Lanes round(Lanes a) {
    for (int i = 0; i < kLanes; i++) a[i] = std::nearbyintf(a[i]);
    return a;
}
inline Lanes times_power_of_two(Lanes a, Lanes n) {
    for (int i = 0; i < kLanes; i++) a[i] = n[i] == n[i] ? std::ldexp(a[i], static_cast<int>(n[i])) : n[i];
    return a;
}
inline Lanes zero_where_below(Lanes v, Lanes x, float limit) {
    for (int i = 0; i < kLanes; i++) {
        if (x[i] < limit) v[i] = 0.0f;
    }
    return v;
}
// `yes` where x is below `limit`, else `no`, also where x is NaN.
inline Lanes where_below(Lanes x, float limit, Lanes yes, Lanes no) {
    for (int i = 0; i < kLanes; i++) no[i] = x[i] < limit ? yes[i] : no[i];
    return no;
}
// Lane i + lane i + 2, and so on by halves.
inline float sum_of(Lanes v) { return (v[0] + v[2]) + (v[1] + v[3]); }
// NaN if any lane is.
inline float max_of(Lanes v) {
    float result = v[0];
    for (int i = 1; i < kLanes; i++) result = result > v[i] || result != result ? result : v[i];
    return result;
}
// `outside` in all lanes but begin .. end-1.
inline Lanes keep_range(Lanes v, int begin, int end, float outside) {
    for (int i = 0; i < kLanes; i++) {
        if (i < begin || i >= end) v[i] = outside;
    }
    return v;
}

}  // namespace
}  // namespace diptych
