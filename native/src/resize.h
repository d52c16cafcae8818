/* Separable resizing: each output pixel is a weighted sum of neighboring input pixels, along one axis at a time. */
#ifndef STOKER_RESIZE_H
#define STOKER_RESIZE_H

#include <stddef.h>
#include <stdint.h>

#include "scratch.h"

#define RESIZE_OVERREAD 32 /* bytes past the end of a row that may be read, though never used */

/* One axis: output i is the sum of weights[i * taps + k] / 2^14 times input first[i] + k, for `taps` (even) inputs.
   Inputs are numbered from `low`; `high - low` of them, and at least `taps`, must be readable. */
struct resize_axis {
    int *first;
    int16_t *weights;
    double *exact_weights, *kernel; /* weights of one output before rounding; weights of the blur */
    struct scratch first_scratch, weights_scratch, exact_weights_scratch, kernel_scratch;
    int taps, low, high;
};

void resize_axis_free(struct resize_axis *axis);

/* Bilinear interpolation of inputs `from` to `from + length`, reversed if `flip`. With `antialias`, inputs are blurred
   first when shrinking, as in stoker.load.decode. Returns 0 if out of memory. */
int resize_axis_linear(struct resize_axis *axis, int side, int from, int length, int antialias, int flip);

/* Pillow's bilinear filter: a triangle as wide as the shrink factor; reads beyond the box, up to `limit` inputs. */
int resize_axis_triangle(struct resize_axis *axis, int side, double from, double length, int limit, int flip);

/* Resize RGB pixels that start at (x.low, y.low), in rows `stride` bytes apart. `intermediate` has room for three
   16-bit values per column plus 2 * RESIZE_OVERREAD bytes, `last_row` for side * 3 + RESIZE_OVERREAD bytes. */
void resize_rgb(const struct resize_axis *x, const struct resize_axis *y, const uint8_t *pixels, size_t stride,
                int columns, int side, int16_t *intermediate, uint8_t *last_row, uint8_t *out, int simd);

int resize_has_simd(void);

#endif
