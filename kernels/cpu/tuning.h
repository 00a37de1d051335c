// What is best for one CPU and not for another of the same instruction sets, as measured.
//
// With up to so many rows of a tile the hardware's own fetching of weights is faster than a kernel's, as long as nothing
// is read out of order. With more the core computes for too long to see far enough ahead itself.
#pragma once

namespace diptych {
namespace {

#if defined(DIPTYCH_FOR_ZEN5)
// Its own fetching soon falls behind: a step of one row in codes took 3.6 ms on a core and takes 2.7, and 2.4 -> 2.1 on
// two. And it computes so fast that more products wait for memory.
constexpr int kFewRows = 2;
constexpr int kFewBlockRows = 0;  // of quantised blocks: a group takes more computing
constexpr int kFewCodedRows = 0;  // of codes
constexpr int kCodedRows = 4;     // of the products that read codes where there are some
#else
constexpr int kFewRows = 4;
constexpr int kFewBlockRows = 2;
constexpr int kFewCodedRows = 1;
constexpr int kCodedRows = 1;  // with two codes cost one core of a Zen 4 more than they save it
#endif

}  // namespace
}  // namespace diptych
