/* Function attributes and loads shared by the AVX2 code paths. */
#ifndef STOKER_AVX2_H
#define STOKER_AVX2_H

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_AVX2 1 /* the compiler can emit AVX2; whether the CPU has it is checked at run time */

#include <immintrin.h>
#include <stdint.h>

#define AVX2 __attribute__((target("avx2")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2")))
#define AVX2_BMI2 __attribute__((target("avx2,bmi2")))
#define AVX2_BMI2_INLINE static inline __attribute__((always_inline, target("avx2,bmi2")))

/* Load eight 16-bit values into each 128-bit half. */
AVX2_INLINE __m256i load_halves(const int16_t *low, const int16_t *high) {
    __m256i first = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)low));
    return _mm256_inserti128_si256(first, _mm_loadu_si128((const __m128i *)high), 1);
}

/* A pair of 16-bit weights repeated in every 32-bit lane, as _mm256_madd_epi16 takes them. */
AVX2_INLINE __m256i weight_pair(int first, int second) {
    return _mm256_set1_epi32((int)((uint32_t)(uint16_t)first | (uint32_t)(uint16_t)second << 16));
}

#endif
#endif
