#include "color.h"

#include "avx2.h"

#ifdef HAVE_AVX2
#include <stddef.h>

AVX2_BMI2 void upsample_row(const uint8_t *row, const uint8_t *next_row, int count, int horizontal, int bias,
                            uint8_t *restrict out) {
    if (next_row && !horizontal) {
        for (int i = 0; i < count; i++) out[i] = (uint8_t)((3 * row[i] + next_row[i] + bias) >> 2);
    } else if (next_row) {
        for (int i = 0; i < count; i++) {
            int left = 3 * row[i - 1] + next_row[i - 1], here = 3 * row[i] + next_row[i];
            int right = 3 * row[i + 1] + next_row[i + 1];
            out[2 * i] = (uint8_t)((3 * here + left + 8) >> 4);
            out[2 * i + 1] = (uint8_t)((3 * here + right + 7) >> 4);
        }
    } else {
        for (int i = 0; i < count; i++) {
            out[2 * i] = (uint8_t)((3 * row[i] + row[i - 1] + 1) >> 2);
            out[2 * i + 1] = (uint8_t)((3 * row[i] + row[i + 1] + 2) >> 2);
        }
    }
}

/* Return cb * weight_cb + cr * weight_cr, rounded, of interleaved Cb and Cr; weights have 16 fraction bits. */
AVX2_BMI2_INLINE __m256i weigh_chroma(__m256i low, __m256i high, int weight_cb, int weight_cr) {
    const __m256i weights = weight_pair(weight_cb, weight_cr);
    const __m256i half = _mm256_set1_epi32(1 << 15);
    low = _mm256_srai_epi32(_mm256_add_epi32(_mm256_madd_epi16(low, weights), half), 16);
    high = _mm256_srai_epi32(_mm256_add_epi32(_mm256_madd_epi16(high, weights), half), 16);
    return _mm256_packs_epi32(low, high);
}

AVX2_BMI2_INLINE __m128i pack_bytes(__m256i words) {
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

AVX2_BMI2_INLINE __m256i load_words(const uint8_t *bytes) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)bytes));
}

/* Take bytes 0, 3, 6, ... from `first`, 1, 4, 7, ... from `second`, and the others from `third`. */
AVX2_BMI2_INLINE __m128i blend_thirds(__m128i first, __m128i second, __m128i third) {
    const __m128i seconds = _mm_setr_epi8(0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0);
    const __m128i thirds = _mm_setr_epi8(0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0);
    return _mm_blendv_epi8(_mm_blendv_epi8(first, second, seconds), third, thirds);
}

/* Store 16 interleaved RGB pixels. */
AVX2_BMI2_INLINE void store_rgb(__m128i red, __m128i green, __m128i blue, uint8_t *out) {
    /* Of the three vectors written, the first begins with red, the second with green, the third with blue. */
    red = _mm_shuffle_epi8(red, _mm_setr_epi8(0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10, 5));
    green = _mm_shuffle_epi8(green, _mm_setr_epi8(5, 0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10));
    blue = _mm_shuffle_epi8(blue, _mm_setr_epi8(10, 5, 0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15));
    _mm_storeu_si128((__m128i *)out, blend_thirds(red, green, blue));
    _mm_storeu_si128((__m128i *)out + 1, blend_thirds(green, blue, red));
    _mm_storeu_si128((__m128i *)out + 2, blend_thirds(blue, red, green));
}

AVX2_BMI2 void ycc_to_rgb(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, int count, uint8_t *out) {
    const __m256i offset = _mm256_set1_epi16(128);
    for (int i = 0; i < count; i += 16) {
        __m128i red = _mm_loadu_si128((const __m128i *)(y + i)), green = red, blue = red;
        if (cb) {
            __m256i luma = load_words(y + i);
            __m256i b = _mm256_sub_epi16(load_words(cb + i), offset), r = _mm256_sub_epi16(load_words(cr + i), offset);
            __m256i low = _mm256_unpacklo_epi16(b, r), high = _mm256_unpackhi_epi16(b, r);
            /* 1.402 is 1 + 26345 / 2^16, -0.71414 is -1 + 18734 / 2^16, 1.772 is 2 - 14942 / 2^16. */
            __m256i add_red = _mm256_add_epi16(r, weigh_chroma(low, high, 0, 26345));
            __m256i add_green = _mm256_sub_epi16(weigh_chroma(low, high, -22554, 18734), r);
            __m256i add_blue = _mm256_add_epi16(_mm256_add_epi16(b, b), weigh_chroma(low, high, -14942, 0));
            red = pack_bytes(_mm256_add_epi16(luma, add_red));
            green = pack_bytes(_mm256_add_epi16(luma, add_green));
            blue = pack_bytes(_mm256_add_epi16(luma, add_blue));
        }
        store_rgb(red, green, blue, out + 3 * i);
    }
}

#endif
