#include "idct.h"

#include "avx2.h"

#ifdef HAVE_AVX2
#include <string.h>

/* Rows a and b, given as (a0 a1 | b0 b1) in 64-bit quarters, into (a0 b0 | a1 b1), the layout that idct_1d takes. */
AVX2_BMI2_INLINE __m256i interleave_halves(__m256i rows) { return _mm256_permute4x64_epi64(rows, 0xD8); }

AVX2_BMI2_INLINE __m256i swap_quarters(__m256i pair) { return _mm256_shuffle_epi32(pair, 0x4E); }

/* Return first * first_weight + second * second_weight; weights have 13 fraction bits. */
AVX2_BMI2_INLINE __m256i multiply_add(__m256i first, __m256i second, int first_weight, int second_weight) {
    return _mm256_madd_epi16(_mm256_unpacklo_epi16(first, second), weight_pair(first_weight, second_weight));
}

/* Eight 8-point inverse DCTs side by side, with the 16-bit intermediates of libjpeg-turbo's SIMD version.
   pairs[i] holds inputs i and i + 4, interleaved. */
AVX2_BMI2_INLINE void idct_1d(const __m256i *pairs, int shift, __m256i *out) {
    const __m256i zero = _mm256_setzero_si256(), round = _mm256_set1_epi32(1 << (shift - 1));
    __m256i v1 = pairs[1], v2 = pairs[2], v3 = pairs[3];
    __m256i v4 = swap_quarters(pairs[0]), v5 = swap_quarters(v1), v6 = swap_quarters(v2), v7 = swap_quarters(v3);
    __m256i sum = _mm256_unpacklo_epi16(zero, _mm256_add_epi16(pairs[0], v4)); /* in the upper half of 32 bits */
    __m256i difference = _mm256_unpacklo_epi16(zero, _mm256_sub_epi16(pairs[0], v4));
    sum = _mm256_add_epi32(_mm256_srai_epi32(sum, 16 - 13), round);
    difference = _mm256_add_epi32(_mm256_srai_epi32(difference, 16 - 13), round);
    __m256i t2 = multiply_add(v2, v6, 4433, 4433 - 15137), t3 = multiply_add(v2, v6, 4433 + 6270, 4433);
    __m256i even[4] = {_mm256_add_epi32(sum, t3), _mm256_add_epi32(difference, t2), _mm256_sub_epi32(difference, t2),
                       _mm256_sub_epi32(sum, t3)};

    __m256i s3 = _mm256_add_epi16(v7, v3), s4 = _mm256_add_epi16(v5, v1);
    __m256i z3 = multiply_add(s3, s4, 9633 - 16069, 9633), z4 = multiply_add(s3, s4, 9633, 9633 - 3196);
    __m256i odd[4] = {
        _mm256_add_epi32(multiply_add(v7, v1, -7373, 12299 - 7373), z4),
        _mm256_add_epi32(multiply_add(v5, v3, -20995, 25172 - 20995), z3),
        _mm256_add_epi32(multiply_add(v5, v3, 16819 - 20995, -20995), z4),
        _mm256_add_epi32(multiply_add(v7, v1, 2446 - 7373, -7373), z3),
    };
    for (int i = 0; i < 4; i++) {
        out[i] = _mm256_srai_epi32(_mm256_add_epi32(even[i], odd[i]), shift);
        out[7 - i] = _mm256_srai_epi32(_mm256_sub_epi32(even[i], odd[i]), shift);
    }
}

/* Transpose eight rows of 32-bit values into 16-bit columns, interleaved in pairs as idct_1d takes them. */
AVX2_BMI2_INLINE void transpose(const __m256i *rows, __m256i *pairs) {
    __m256i quads[4]; /* rows 0 to 3 or 4 to 7 of two columns in each half */
    for (int i = 0; i < 2; i++) {
        const __m256i *four = rows + 4 * i;
        __m256i low = _mm256_packs_epi32(four[0], four[1]), high = _mm256_packs_epi32(four[2], four[3]);
        __m256i evens = _mm256_unpacklo_epi16(low, high), odds = _mm256_unpackhi_epi16(low, high);
        quads[i] = _mm256_unpacklo_epi16(evens, odds);
        quads[i + 2] = _mm256_unpackhi_epi16(evens, odds);
    }
    for (int i = 0; i < 2; i++) {
        pairs[2 * i] = interleave_halves(_mm256_unpacklo_epi64(quads[2 * i], quads[2 * i + 1]));
        pairs[2 * i + 1] = interleave_halves(_mm256_unpackhi_epi64(quads[2 * i], quads[2 * i + 1]));
    }
}

/* Convert eight columns of 32-bit values to bytes around 128 and store them as eight rows. */
AVX2_BMI2_INLINE void store_columns(const __m256i *columns, uint8_t *out, size_t stride) {
    const __m256i by_row = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9,
                                            13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i offset = _mm256_set1_epi8(-128);
    __m256i halves[2]; /* four columns each */
    for (int i = 0; i < 2; i++) {
        const __m256i *four = columns + 4 * i;
        __m256i low = _mm256_packs_epi32(four[0], four[1]), high = _mm256_packs_epi32(four[2], four[3]);
        halves[i] = _mm256_shuffle_epi8(_mm256_xor_si256(_mm256_packs_epi16(low, high), offset), by_row);
    }
    for (int i = 0; i < 2; i++) {
        __m256i rows = i ? _mm256_unpackhi_epi32(halves[0], halves[1]) : _mm256_unpacklo_epi32(halves[0], halves[1]);
        __m128i upper = _mm256_castsi256_si128(rows), lower = _mm256_extracti128_si256(rows, 1);
        uint8_t *to = out + (size_t)(2 * i) * stride;
        _mm_storel_epi64((__m128i *)to, upper);
        _mm_storeh_pd((double *)(to + stride), _mm_castsi128_pd(upper));
        _mm_storel_epi64((__m128i *)(to + 4 * stride), lower);
        _mm_storeh_pd((double *)(to + 5 * stride), _mm_castsi128_pd(lower));
    }
}

AVX2_BMI2 void idct_block(const int16_t *coefficients, const int16_t *quant, uint8_t *out, size_t stride) {
    const __m256i high_half = _mm256_setr_epi64x(0, 0, -1, -1);
    __m256i rows[4], pairs[4], v[BLOCK_SIDE];
    for (int i = 0; i < 4; i++)
        rows[i] = load_halves(coefficients + i * BLOCK_SIDE, coefficients + (i + 4) * BLOCK_SIDE);
    __m256i rest = _mm256_or_si256(_mm256_or_si256(rows[1], rows[2]), rows[3]);
    if (_mm256_testz_si256(rest, rest) && _mm256_testz_si256(rows[0], high_half)) {
        /* Only the first row has coefficients: the column pass is a shift. Like libjpeg's, it wraps around instead of
           saturating, so that even damaged images decode to the same samples. */
        __m128i first = _mm_mullo_epi16(_mm256_castsi256_si128(rows[0]), _mm_loadu_si128((const __m128i *)quant));
        __m256i both = _mm256_broadcastsi128_si256(_mm_slli_epi16(first, 2));
        const __m256i four_times = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0908090809080908, 0x0100010001000100));
        for (int i = 0; i < 4; i++)
            pairs[i] = _mm256_shuffle_epi8(both, _mm256_add_epi8(four_times, _mm256_set1_epi8((char)(2 * i))));
    } else {
        for (int i = 0; i < 4; i++) {
            __m256i factors = load_halves(quant + i * BLOCK_SIDE, quant + (i + 4) * BLOCK_SIDE);
            pairs[i] = interleave_halves(_mm256_mullo_epi16(rows[i], factors));
        }
        idct_1d(pairs, 11, v);
        transpose(v, pairs);
    }
    idct_1d(pairs, 18, v);
    store_columns(v, out, stride);
}

void idct_dc_only(int dc, int quant, uint8_t *out, size_t stride) {
    int level = (((int16_t)((uint32_t)dc * (uint32_t)quant << 2) + 16) >> 5) + 128;
    level = level < 0 ? 0 : level > 255 ? 255 : level;
    for (int i = 0; i < BLOCK_SIDE; i++) memset(out + (size_t)i * stride, level, BLOCK_SIDE);
}

#endif
