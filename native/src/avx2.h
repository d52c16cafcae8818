/* What those that use AVX2 share. Only for x86-64 and compilers that know GCC's attributes. */
#ifndef STOKER_AVX2_H
#define STOKER_AVX2_H

#include <immintrin.h>
#include <stdint.h>

#define AVX2 __attribute__((target("avx2")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2")))

/* Eight numbers from each of two places. */
AVX2_INLINE __m256i two_eights(const int16_t *low, const int16_t *high) {
    __m256i first = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)low));
    return _mm256_inserti128_si256(first, _mm_loadu_si128((const __m128i *)high), 1);
}

#endif
