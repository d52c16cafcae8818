#include "resize.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define KEPT_BYTES ((size_t)16 << 20)
#define WEIGHT_BITS 14
#define ONE (1 << WEIGHT_BITS)
#define MIDDLE_BITS 6 /* below the point, between the two directions: 255 * 2^6 fits 16 bits */
#define DOWN (WEIGHT_BITS - MIDDLE_BITS)
#define ACROSS (WEIGHT_BITS + MIDDLE_BITS)

void *resize_room(struct resize_memory *memory, size_t bytes) {
    if (bytes > memory->bytes) {
        resize_free(memory);
        memory->start = calloc(1, bytes);
        memory->bytes = memory->start ? bytes : 0;
    }
    return memory->start;
}

void resize_free(struct resize_memory *memory) {
    free(memory->start);
    memory->start = NULL;
    memory->bytes = 0;
}

void resize_trim(struct resize_memory *memory) {
    if (memory->bytes > KEPT_BYTES) resize_free(memory);
}

static int axis_room(struct resize_axis *axis, int side, int taps) {
    axis->taps = taps;
    axis->first = resize_room(&axis->first_room, (size_t)side * sizeof *axis->first);
    axis->weights = resize_room(&axis->weights_room, (size_t)side * (size_t)taps * sizeof *axis->weights);
    axis->scratch = resize_room(&axis->scratch_room, (size_t)taps * sizeof *axis->scratch);
    return axis->first && axis->weights && axis->scratch;
}

void resize_axis_free(struct resize_axis *axis) {
    resize_free(&axis->first_room);
    resize_free(&axis->weights_room);
    resize_free(&axis->scratch_room);
    resize_free(&axis->kernel_room);
}

/* Round the weights of one output so that they sum to one exactly: a grey area stays the same grey. */
static void keep_weights(struct resize_axis *axis, int output, int first) {
    int16_t *weights = axis->weights + (size_t)output * (size_t)axis->taps;
    int sum = 0, largest = 0;
    for (int k = 0; k < axis->taps; k++) {
        weights[k] = (int16_t)lrint(axis->scratch[k] * ONE);
        sum += weights[k];
        if (weights[k] > weights[largest]) largest = k;
    }
    weights[largest] = (int16_t)(weights[largest] + ONE - sum);
    axis->first[output] = first;
}

static int clamp(int value, int low, int high) { return value < low ? low : value > high ? high : value; }

/* Move the weights of outputs near the end, so that none reads beyond the last input unless there are too few. */
static void settle(struct resize_axis *axis, int side) {
    int last = axis->high - axis->low - axis->taps;
    if (last < 0) last = 0;
    for (int i = 0; i < side; i++) {
        int beyond = axis->first[i] - last;
        if (beyond <= 0) continue;
        int16_t *weights = axis->weights + (size_t)i * (size_t)axis->taps;
        memmove(weights + beyond, weights, (size_t)(axis->taps - beyond) * sizeof *weights);
        memset(weights, 0, (size_t)beyond * sizeof *weights);
        axis->first[i] = last;
    }
}

/* Make a blur's kernel with variance (shrink^2 - 1) / 5, and tell its taps on each side of the middle one, or -1.
   decode.py says why. */
static int gauss(struct resize_axis *axis, double shrink) {
    double variance = (shrink * shrink - 1) / 5, sigma = sqrt(variance < 0 ? 0 : variance), sum = 0;
    int around = (int)ceil(3 * sigma);
    if (variance < 0.004) {
        around = 0;
    } else if (variance <= 0.5) {
        double side = variance / 2;
        around = 1;
        sigma = sqrt(-0.5 / log(side / (1 - 2 * side)));
    }
    axis->kernel = resize_room(&axis->kernel_room, (size_t)(2 * around + 1) * sizeof *axis->kernel);
    if (!axis->kernel) return -1;
    if (around == 0) sigma = 1;
    for (int k = -around; k <= around; k++) sum += axis->kernel[k + around] = exp(-0.5 * k * k / (sigma * sigma));
    for (int k = 0; k <= 2 * around; k++) axis->kernel[k] /= sum;
    return around;
}

int resize_axis_linear(struct resize_axis *axis, int side, int from, int length, int smooth, int flip) {
    double scale = (double)length / side;
    int around = gauss(axis, smooth ? scale : 1.0);
    if (around < 0 || !axis_room(axis, side, 2 * around + 2)) return 0;
    axis->low = from;
    axis->high = from + length;
    for (int i = 0; i < side; i++) {
        double at = (i + 0.5) * scale - 0.5;
        int left = (int)floor(at);
        double part = at - left;
        if (left < 0) left = 0, part = 0;
        if (left >= length - 1) left = length - 1, part = 0;
        int first = clamp(left - around, 0, length - 1);
        memset(axis->scratch, 0, (size_t)axis->taps * sizeof *axis->scratch);
        for (int k = -around; k <= around; k++) {
            axis->scratch[clamp(left + k, 0, length - 1) - first] += axis->kernel[k + around] * (1 - part);
            axis->scratch[clamp(left + 1 + k, 0, length - 1) - first] += axis->kernel[k + around] * part;
        }
        keep_weights(axis, flip ? side - 1 - i : i, first);
    }
    settle(axis, side);
    return 1;
}

int resize_axis_triangle(struct resize_axis *axis, int side, double from, double length, int limit, int flip) {
    double scale = length / side, reach = scale > 1 ? scale : 1;
    if (!axis_room(axis, side, 2 * (int)ceil(reach) + 2)) return 0;
    axis->low = limit;
    axis->high = 0;
    for (int i = 0; i < side; i++) {
        double middle = from + (i + 0.5) * scale, sum = 0;
        int low = clamp((int)(middle - reach + 0.5), 0, limit - 1);
        int high = clamp((int)(middle + reach + 0.5), low + 1, limit);
        memset(axis->scratch, 0, (size_t)axis->taps * sizeof *axis->scratch);
        for (int k = low; k < high; k++) {
            double away = fabs(k - middle + 0.5) / reach;
            sum += axis->scratch[k - low] = away < 1 ? 1 - away : 0;
        }
        if (sum <= 0) axis->scratch[0] = sum = 1;
        for (int k = 0; k < axis->taps; k++) axis->scratch[k] /= sum;
        keep_weights(axis, flip ? side - 1 - i : i, low);
        if (low < axis->low) axis->low = low;
        if (high > axis->high) axis->high = high;
    }
    for (int i = 0; i < side; i++) axis->first[i] -= axis->low;
    settle(axis, side);
    return 1;
}

static void down_portable(const uint8_t *rows, size_t stride, const int16_t *weights, int taps, int count, int16_t *out) {
    for (int i = 0; i < count; i++) {
        int sum = 1 << (DOWN - 1);
        for (int k = 0; k < taps; k++) sum += weights[k] * rows[(size_t)k * stride + (size_t)i];
        out[i] = (int16_t)(sum >> DOWN);
    }
}

static void across_portable(const struct resize_axis *x, const int16_t *middle, int side, uint8_t *out) {
    for (int i = 0; i < side; i++) {
        const int16_t *from = middle + 3 * x->first[i], *weights = x->weights + (size_t)i * (size_t)x->taps;
        for (int colour = 0; colour < 3; colour++) {
            int sum = 1 << (ACROSS - 1);
            for (int k = 0; k < x->taps; k++) sum += weights[k] * from[3 * k + colour];
            out[3 * i + colour] = (uint8_t)(sum >> ACROSS);
        }
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include "avx2.h"

int resize_has_simd(void) { return __builtin_cpu_supports("avx2"); }

static int pair_of(const int16_t *weights) {
    int pair;
    memcpy(&pair, weights, sizeof pair);
    return pair;
}

AVX2_INLINE void down_taps(const uint8_t *rows, size_t stride, const int16_t *weights, int taps, int count, int16_t *out) {
    const __m256i half = _mm256_set1_epi32(1 << (DOWN - 1));
    for (int i = 0; i < count; i += 16) {
        __m256i low = half, high = half;
        for (int k = 0; k < taps; k += 2) {
            const uint8_t *row = rows + (size_t)k * stride + (size_t)i;
            __m256i one = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)row));
            __m256i two = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(row + stride)));
            __m256i pair = _mm256_set1_epi32(pair_of(weights + k));
            low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(one, two), pair));
            high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(one, two), pair));
        }
        low = _mm256_srai_epi32(low, DOWN);
        high = _mm256_srai_epi32(high, DOWN);
        _mm256_storeu_si256((__m256i *)(out + i), _mm256_packs_epi32(low, high));
    }
}

AVX2 static void down_simd(const uint8_t *rows, size_t stride, const int16_t *weights, int taps, int count, int16_t *out) {
    switch (taps) { /* a number of taps that is known lets the compiler unroll them */
    case 2: down_taps(rows, stride, weights, 2, count, out); break;
    case 4: down_taps(rows, stride, weights, 4, count, out); break;
    default: down_taps(rows, stride, weights, taps, count, out);
    }
}

/* The sums of two outputs, one in each half: red, green, blue and nothing. */
AVX2_INLINE __m256i two_sums(const int16_t *one, const int16_t *two, const int16_t *one_w, const int16_t *two_w, int taps) {
    /* Two neighbours' colours side by side: r r g g b b. */
    const __m256i by_colour = _mm256_setr_epi8(0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, -1, -1, -1, -1, 0, 1, 6, 7, 2, 3, 8,
                                               9, 4, 5, 10, 11, -1, -1, -1, -1);
    __m256i sum = _mm256_set1_epi32(1 << (ACROSS - 1));
    for (int k = 0; k < taps; k += 2) {
        __m256i pixels = two_eights(one + 3 * k, two + 3 * k);
        __m256i pair = _mm256_set_m128i(_mm_set1_epi32(pair_of(two_w + k)), _mm_set1_epi32(pair_of(one_w + k)));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, by_colour), pair));
    }
    return _mm256_srai_epi32(sum, ACROSS);
}

AVX2_INLINE void across_taps(const struct resize_axis *x, const int16_t *middle, int taps, int side, uint8_t *out) {
    const __m256i without_gaps = _mm256_setr_epi8(0, 1, 2, 4, 5, 6, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 2, 4, 5,
                                                  6, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    for (int i = 0; i + 3 < side; i += 4) {
        const int *first = x->first + i;
        const int16_t *w = x->weights + (size_t)i * (size_t)taps;
        __m256i even = two_sums(middle + 3 * first[0], middle + 3 * first[2], w, w + 2 * taps, taps);
        __m256i odd = two_sums(middle + 3 * first[1], middle + 3 * first[3], w + taps, w + 3 * taps, taps);
        __m256i words = _mm256_packs_epi32(even, odd);
        __m256i bytes = _mm256_shuffle_epi8(_mm256_packus_epi16(words, words), without_gaps);
        _mm_storel_epi64((__m128i *)(out + 3 * i), _mm256_castsi256_si128(bytes));
        _mm_storel_epi64((__m128i *)(out + 3 * i + 6), _mm256_extracti128_si256(bytes, 1));
    }
}

AVX2 static void across_simd(const struct resize_axis *x, const int16_t *middle, int side, uint8_t *out) {
    switch (x->taps) {
    case 2: across_taps(x, middle, 2, side, out); break;
    case 4: across_taps(x, middle, 4, side, out); break;
    default: across_taps(x, middle, x->taps, side, out);
    }
    int left = side % 4;
    struct resize_axis rest = *x;
    rest.first += side - left;
    rest.weights += (size_t)(side - left) * (size_t)x->taps;
    across_portable(&rest, middle, left, out + 3 * (side - left));
}
#else
int resize_has_simd(void) { return 0; }
#define down_simd down_portable
#define across_simd across_portable
#endif

void resize_rgb(const struct resize_axis *x, const struct resize_axis *y, const uint8_t *pixels, size_t stride,
                int columns, int side, int16_t *middle, uint8_t *line, uint8_t *out, int simd) {
    for (int row = 0; row < side; row++) {
        /* SIMD writes a little beyond a row: into the next one, which comes later, but not behind the last one. */
        uint8_t *to = row + 1 < side ? out + (size_t)row * (size_t)side * 3 : line;
        const uint8_t *rows = pixels + (size_t)y->first[row] * stride;
        const int16_t *weights = y->weights + (size_t)row * (size_t)y->taps;
        if (simd) {
            down_simd(rows, stride, weights, y->taps, 3 * columns, middle);
            across_simd(x, middle, side, to);
        } else {
            down_portable(rows, stride, weights, y->taps, 3 * columns, middle);
            across_portable(x, middle, side, to);
        }
        if (to == line) memcpy(out + (size_t)row * (size_t)side * 3, line, (size_t)side * 3);
    }
}
