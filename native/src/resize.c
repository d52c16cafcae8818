#include "resize.h"

#include <math.h>
#include <string.h>

#include "avx2.h"

#define WEIGHT_BITS 14
#define ONE (1 << WEIGHT_BITS)
#define INTERMEDIATE_BITS 6 /* fraction bits between the two passes: 255 * 2^6 fits in 16 bits */
#define VERTICAL_SHIFT (WEIGHT_BITS - INTERMEDIATE_BITS)
#define HORIZONTAL_SHIFT (WEIGHT_BITS + INTERMEDIATE_BITS)

static int reserve_axis(struct resize_axis *axis, int side, int taps) {
    axis->taps = taps;
    axis->first = scratch_reserve(&axis->first_scratch, (size_t)side * sizeof *axis->first);
    axis->weights = scratch_reserve(&axis->weights_scratch, (size_t)side * (size_t)taps * sizeof *axis->weights);
    axis->exact_weights = scratch_reserve(&axis->exact_weights_scratch, (size_t)taps * sizeof *axis->exact_weights);
    return axis->first && axis->weights && axis->exact_weights;
}

void resize_axis_free(struct resize_axis *axis) {
    scratch_free(&axis->first_scratch);
    scratch_free(&axis->weights_scratch);
    scratch_free(&axis->exact_weights_scratch);
    scratch_free(&axis->kernel_scratch);
}

/* Round the weights of one output so that they sum to exactly one: a uniform area keeps its color. */
static void store_weights(struct resize_axis *axis, int output, int first) {
    int16_t *weights = axis->weights + (size_t)output * (size_t)axis->taps;
    int sum = 0, largest = 0;
    for (int k = 0; k < axis->taps; k++) {
        weights[k] = (int16_t)lrint(axis->exact_weights[k] * ONE);
        sum += weights[k];
        if (weights[k] > weights[largest]) largest = k;
    }
    weights[largest] = (int16_t)(weights[largest] + ONE - sum);
    axis->first[output] = first;
}

static int clamp(int value, int low, int high) { return value < low ? low : value > high ? high : value; }

/* Shift the weights of the last outputs so that none reads past the last input, unless there are fewer than `taps`. */
static void shift_last_weights(struct resize_axis *axis, int side) {
    int last = axis->high - axis->low - axis->taps;
    if (last < 0) last = 0;
    for (int i = 0; i < side; i++) {
        int excess = axis->first[i] - last;
        if (excess <= 0) continue;
        int16_t *weights = axis->weights + (size_t)i * (size_t)axis->taps;
        memmove(weights + excess, weights, (size_t)(axis->taps - excess) * sizeof *weights);
        memset(weights, 0, (size_t)excess * sizeof *weights);
        axis->first[i] = last;
    }
}

/* Build a Gaussian kernel of variance (shrink^2 - 1) / 5; decode.py explains why. Returns its radius, -1 if out of
   memory. */
static int build_blur_kernel(struct resize_axis *axis, double shrink) {
    double variance = (shrink * shrink - 1) / 5, sigma = sqrt(variance < 0 ? 0 : variance), sum = 0;
    int radius = (int)ceil(3 * sigma);
    if (variance < 0.004) {
        radius = 0;
    } else if (variance <= 0.5) {
        double outer = variance / 2;
        radius = 1;
        sigma = sqrt(-0.5 / log(outer / (1 - 2 * outer)));
    }
    axis->kernel = scratch_reserve(&axis->kernel_scratch, (size_t)(2 * radius + 1) * sizeof *axis->kernel);
    if (!axis->kernel) return -1;
    if (radius == 0) sigma = 1;
    for (int k = -radius; k <= radius; k++) sum += axis->kernel[k + radius] = exp(-0.5 * k * k / (sigma * sigma));
    for (int k = 0; k <= 2 * radius; k++) axis->kernel[k] /= sum;
    return radius;
}

int resize_axis_linear(struct resize_axis *axis, int side, int from, int length, int antialias, int flip) {
    double scale = (double)length / side;
    int radius = build_blur_kernel(axis, antialias ? scale : 1.0);
    if (radius < 0 || !reserve_axis(axis, side, 2 * radius + 2)) return 0;
    axis->low = from;
    axis->high = from + length;
    for (int i = 0; i < side; i++) {
        double at = (i + 0.5) * scale - 0.5;
        int left = (int)floor(at);
        double fraction = at - left;
        if (left < 0) left = 0, fraction = 0;
        if (left >= length - 1) left = length - 1, fraction = 0;
        int first = clamp(left - radius, 0, length - 1);
        memset(axis->exact_weights, 0, (size_t)axis->taps * sizeof *axis->exact_weights);
        for (int k = -radius; k <= radius; k++) {
            axis->exact_weights[clamp(left + k, 0, length - 1) - first] += axis->kernel[k + radius] * (1 - fraction);
            axis->exact_weights[clamp(left + 1 + k, 0, length - 1) - first] += axis->kernel[k + radius] * fraction;
        }
        store_weights(axis, flip ? side - 1 - i : i, first);
    }
    shift_last_weights(axis, side);
    return 1;
}

int resize_axis_triangle(struct resize_axis *axis, int side, double from, double length, int limit, int flip) {
    double scale = length / side, reach = scale > 1 ? scale : 1;
    if (!reserve_axis(axis, side, 2 * (int)ceil(reach) + 2)) return 0;
    axis->low = limit;
    axis->high = 0;
    for (int i = 0; i < side; i++) {
        double center = from + (i + 0.5) * scale, sum = 0;
        int low = clamp((int)(center - reach + 0.5), 0, limit - 1);
        int high = clamp((int)(center + reach + 0.5), low + 1, limit);
        memset(axis->exact_weights, 0, (size_t)axis->taps * sizeof *axis->exact_weights);
        for (int k = low; k < high; k++) {
            double distance = fabs(k - center + 0.5) / reach;
            sum += axis->exact_weights[k - low] = distance < 1 ? 1 - distance : 0;
        }
        if (sum <= 0) axis->exact_weights[0] = sum = 1;
        for (int k = 0; k < axis->taps; k++) axis->exact_weights[k] /= sum;
        store_weights(axis, flip ? side - 1 - i : i, low);
        if (low < axis->low) axis->low = low;
        if (high > axis->high) axis->high = high;
    }
    for (int i = 0; i < side; i++) axis->first[i] -= axis->low;
    shift_last_weights(axis, side);
    return 1;
}

static void vertical_portable(const uint8_t *rows, size_t stride, const int16_t *weights, int taps, int count,
                              int16_t *out) {
    for (int i = 0; i < count; i++) {
        int sum = 1 << (VERTICAL_SHIFT - 1);
        for (int k = 0; k < taps; k++) sum += weights[k] * rows[(size_t)k * stride + (size_t)i];
        out[i] = (int16_t)(sum >> VERTICAL_SHIFT);
    }
}

static void horizontal_portable(const struct resize_axis *x, const int16_t *intermediate, int side, uint8_t *out) {
    for (int i = 0; i < side; i++) {
        const int16_t *from = intermediate + 3 * x->first[i], *weights = x->weights + (size_t)i * (size_t)x->taps;
        for (int channel = 0; channel < 3; channel++) {
            int sum = 1 << (HORIZONTAL_SHIFT - 1);
            for (int k = 0; k < x->taps; k++) sum += weights[k] * from[3 * k + channel];
            out[3 * i + channel] = (uint8_t)(sum >> HORIZONTAL_SHIFT);
        }
    }
}

#ifdef HAVE_AVX2

int resize_has_simd(void) { return __builtin_cpu_supports("avx2"); }

static int load_pair(const int16_t *weights) {
    int pair;
    memcpy(&pair, weights, sizeof pair);
    return pair;
}

AVX2_INLINE void vertical_taps(const uint8_t *rows, size_t stride, const int16_t *weights, int taps, int count,
                               int16_t *out) {
    const __m256i half = _mm256_set1_epi32(1 << (VERTICAL_SHIFT - 1));
    for (int i = 0; i < count; i += 16) {
        __m256i low = half, high = half;
        for (int k = 0; k < taps; k += 2) {
            const uint8_t *row = rows + (size_t)k * stride + (size_t)i;
            __m256i upper = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)row));
            __m256i lower = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(row + stride)));
            __m256i pair = _mm256_set1_epi32(load_pair(weights + k));
            low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(upper, lower), pair));
            high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(upper, lower), pair));
        }
        low = _mm256_srai_epi32(low, VERTICAL_SHIFT);
        high = _mm256_srai_epi32(high, VERTICAL_SHIFT);
        _mm256_storeu_si256((__m256i *)(out + i), _mm256_packs_epi32(low, high));
    }
}

AVX2 static void vertical_simd(const uint8_t *rows, size_t stride, const int16_t *weights, int taps, int count,
                               int16_t *out) {
    switch (taps) { /* constants, so that the compiler unrolls the loop */
    case 2: vertical_taps(rows, stride, weights, 2, count, out); break;
    case 4: vertical_taps(rows, stride, weights, 4, count, out); break;
    default: vertical_taps(rows, stride, weights, taps, count, out);
    }
}

/* Return the sums of two outputs, one in each half: red, green, blue, zero. */
AVX2_INLINE __m256i sum_two_outputs(const int16_t *first, const int16_t *second, const int16_t *first_weights,
                                    const int16_t *second_weights, int taps) {
    /* Interleave two neighboring pixels: r r g g b b. */
    const __m256i by_channel = _mm256_setr_epi8(0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, -1, -1, -1, -1, /* low half */
                                                0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, -1, -1, -1, -1);
    __m256i sum = _mm256_set1_epi32(1 << (HORIZONTAL_SHIFT - 1));
    for (int k = 0; k < taps; k += 2) {
        __m256i pixels = load_halves(first + 3 * k, second + 3 * k);
        __m256i pair = _mm256_set_m128i(_mm_set1_epi32(load_pair(second_weights + k)),
                                        _mm_set1_epi32(load_pair(first_weights + k)));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, by_channel), pair));
    }
    return _mm256_srai_epi32(sum, HORIZONTAL_SHIFT);
}

AVX2_INLINE void horizontal_taps(const struct resize_axis *x, const int16_t *intermediate, int taps, int side,
                                 uint8_t *out) {
    const __m256i drop_fourth =
        _mm256_setr_epi8(0, 1, 2, 4, 5, 6, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, /* low half */
                         0, 1, 2, 4, 5, 6, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    for (int i = 0; i + 3 < side; i += 4) {
        const int *first = x->first + i;
        const int16_t *w = x->weights + (size_t)i * (size_t)taps;
        __m256i even = sum_two_outputs(intermediate + 3 * first[0], intermediate + 3 * first[2], w, w + 2 * taps, taps);
        __m256i odd =
            sum_two_outputs(intermediate + 3 * first[1], intermediate + 3 * first[3], w + taps, w + 3 * taps, taps);
        __m256i words = _mm256_packs_epi32(even, odd);
        __m256i bytes = _mm256_shuffle_epi8(_mm256_packus_epi16(words, words), drop_fourth);
        _mm_storel_epi64((__m128i *)(out + 3 * i), _mm256_castsi256_si128(bytes));
        _mm_storel_epi64((__m128i *)(out + 3 * i + 6), _mm256_extracti128_si256(bytes, 1));
    }
}

AVX2 static void horizontal_simd(const struct resize_axis *x, const int16_t *intermediate, int side, uint8_t *out) {
    switch (x->taps) {
    case 2: horizontal_taps(x, intermediate, 2, side, out); break;
    case 4: horizontal_taps(x, intermediate, 4, side, out); break;
    default: horizontal_taps(x, intermediate, x->taps, side, out);
    }
    int left = side % 4;
    struct resize_axis rest = *x;
    rest.first += side - left;
    rest.weights += (size_t)(side - left) * (size_t)x->taps;
    horizontal_portable(&rest, intermediate, left, out + 3 * (side - left));
}
#else
int resize_has_simd(void) { return 0; }
#define vertical_simd vertical_portable
#define horizontal_simd horizontal_portable
#endif

void resize_rgb(const struct resize_axis *x, const struct resize_axis *y, const uint8_t *pixels, size_t stride,
                int columns, int side, int16_t *intermediate, uint8_t *last_row, uint8_t *out, int simd) {
    for (int row = 0; row < side; row++) {
        /* SIMD code writes a little past the end of a row, which only matters for the last one: it goes to a buffer
           first. */
        uint8_t *to = row + 1 < side ? out + (size_t)row * (size_t)side * 3 : last_row;
        const uint8_t *rows = pixels + (size_t)y->first[row] * stride;
        const int16_t *weights = y->weights + (size_t)row * (size_t)y->taps;
        if (simd) {
            vertical_simd(rows, stride, weights, y->taps, 3 * columns, intermediate);
            horizontal_simd(x, intermediate, side, to);
        } else {
            vertical_portable(rows, stride, weights, y->taps, 3 * columns, intermediate);
            horizontal_portable(x, intermediate, side, to);
        }
        if (to == last_row) memcpy(out + (size_t)row * (size_t)side * 3, last_row, (size_t)side * 3);
    }
}
