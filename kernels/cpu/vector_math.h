// What the phases compute on registers, whatever their width.
#pragma once

#include <cmath>

#include "bf16.h"

namespace diptych {
namespace {

// e^x within 2 units in the last place; exactly 0 below -87, NaN stays NaN. Cephes' split of ln 2 and a
// polynomial of degree 6.
inline Lanes exp(Lanes x) {
    Lanes bounded = min(splat(88.0f), max(splat(-87.0f), x));
    Lanes n = round(mul(bounded, splat(1.44269504f)));
    Lanes r = fma(n, splat(-0.693359375f), bounded);
    r = fma(n, splat(2.12194440e-4f), r);
    Lanes p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), splat(1.0f));
    return zero_where_below(times_power_of_two(p, n), x, -87.0f);
}

inline Lanes silu(Lanes x) { return div(x, add(splat(1.0f), exp(sub(splat(0.0f), x)))); }

inline Lanes sigmoid(Lanes x) { return div(splat(1.0f), add(splat(1.0f), exp(sub(splat(0.0f), x)))); }

// ln(1 + e^x) within 3e-7 of its size; NaN stays NaN. The logarithm of 1 + u, u = e^-|x|, is 2 artanh(u / (2 + u)), by
// its series of eight terms.
inline Lanes softplus(Lanes x) {
    Lanes u = exp(min(x, sub(splat(0.0f), x)));
    Lanes s = div(u, add(u, splat(2.0f))), z = mul(s, s);
    Lanes p = splat(1.0f / 15.0f);
    p = fma(p, z, splat(1.0f / 13.0f));
    p = fma(p, z, splat(1.0f / 11.0f));
    p = fma(p, z, splat(1.0f / 9.0f));
    p = fma(p, z, splat(1.0f / 7.0f));
    p = fma(p, z, splat(1.0f / 5.0f));
    p = fma(p, z, splat(1.0f / 3.0f));
    p = fma(p, z, splat(1.0f));
    return fma(add(s, s), p, max(splat(0.0f), x));
}

inline float first_of(Lanes x) {
    float all[kLanes];
    store(all, x);
    return all[0];
}

// Within 2e-7; NaN stays NaN. Cephes' polynomial near 0, where 1 - 2 / (e^2x + 1) has few digits left.
inline Lanes tanh(Lanes x) {
    Lanes z = mul(x, x);
    Lanes p = splat(-5.70498872745e-3f);
    p = fma(p, z, splat(2.06390887954e-2f));
    p = fma(p, z, splat(-5.37397155531e-2f));
    p = fma(p, z, splat(1.33314422036e-1f));
    p = fma(p, z, splat(-3.33332819422e-1f));
    Lanes small = fma(mul(p, z), x, x);
    Lanes great = sub(splat(1.0f), div(splat(2.0f), add(exp(add(x, x)), splat(1.0f))));
    return where_below(z, 0.390625f, small, great);
}

// cap * tanh(x / cap): x where it is small, and never beyond the cap.
inline Lanes soft_cap(Lanes x, float cap) { return mul(splat(cap), tanh(div(x, splat(cap)))); }

// The error function within 2e-7 (Abramowitz and Stegun 7.1.26).
inline Lanes erf(Lanes x) {
    Lanes size = max(sub(splat(0.0f), x), x);
    Lanes t = div(splat(1.0f), fma(splat(0.3275911f), size, splat(1.0f)));
    Lanes p = splat(1.061405429f);
    p = fma(p, t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    Lanes above = sub(splat(1.0f), mul(mul(p, t), exp(sub(splat(0.0f), mul(x, x)))));
    return where_below(x, 0.0f, sub(splat(0.0f), above), above);
}

// Calls whole(i) for every full register of 0 .. n-1 and part(i, rest) for what is left.
template <class Whole, class Part>
inline void by_lanes(int n, Whole whole, Part part) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) whole(i);
    if (i < n) part(i, n - i);
}

// to = x / rms(x) * weight (Zhang and Sennrich 2019). `to` may be x.
template <class Out>
inline void rms_norm(const float *x, const float *weight, int n, float epsilon, Out *to) {
    Lanes squares = splat(0.0f);
    by_lanes(
        n, [&](int i) { squares = fma(load(x + i), load(x + i), squares); },
        [&](int i, int rest) {
            Lanes v = load_part(x + i, rest);
            squares = fma(v, v, squares);
        });
    Lanes scale = splat(1.0f / std::sqrt(sum_of(squares) / static_cast<float>(n) + epsilon));
    by_lanes(
        n, [&](int i) { store(to + i, mul(mul(load(x + i), scale), load(weight + i))); },
        [&](int i, int rest) {
            store_part(to + i, mul(mul(load_part(x + i, rest), scale), load_part(weight + i, rest)), rest);
        });
}

// Rotates lane i with lane i + n/2 of a head (the "NeoX" order of Hugging Face's Llama) and scales, in place.
inline void rotate(float *x, const float *cosines, const float *sines, int n, float scale) {
    int half = n / 2;
    Lanes s = splat(scale);
    auto pair = [&](Lanes low, Lanes high, Lanes c, Lanes sine, Lanes &a, Lanes &b) {
        a = mul(sub(mul(low, c), mul(high, sine)), s);
        b = mul(fma(low, sine, mul(high, c)), s);
    };
    by_lanes(
        half,
        [&](int i) {
            Lanes a, b;
            pair(load(x + i), load(x + half + i), load(cosines + i), load(sines + i), a, b);
            store(x + i, a);
            store(x + half + i, b);
        },
        [&](int i, int rest) {
            Lanes a, b;
            pair(load_part(x + i, rest), load_part(x + half + i, rest), load_part(cosines + i, rest),
                 load_part(sines + i, rest), a, b);
            store_part(x + i, a, rest);
            store_part(x + half + i, b, rest);
        });
}

}  // namespace
}  // namespace diptych
