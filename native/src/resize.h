/* Resizing by weights: each output pixel is a sum of neighbouring input pixels, along each axis by itself. */
#ifndef STOKER_RESIZE_H
#define STOKER_RESIZE_H

#include <stddef.h>
#include <stdint.h>

#define RESIZE_OVERREAD 32 /* bytes behind a row that may be read, never used */

/* Memory that is used again, and grows; new memory is zero. */
struct resize_memory {
    void *start;
    size_t bytes;
};

/* Room for so many bytes, whose content is lost if it has to grow; NULL if there is none. */
void *resize_room(struct resize_memory *memory, size_t bytes);
void resize_free(struct resize_memory *memory);

/* Give back what is too much to be kept for the next image. */
void resize_trim(struct resize_memory *memory);

/* One axis: output i is the sum of weights[i * taps + k] / 2^14 times input first[i] + k, for `taps` (even) inputs.
   Inputs are counted from `low`; there must be `high - low` of them, and at least `taps`, to be read. */
struct resize_axis {
    int *first;
    int16_t *weights;
    double *scratch, *kernel; /* one output's weights before they are rounded; a blur's */
    struct resize_memory first_room, weights_room, scratch_room, kernel_room;
    int taps, low, high;
};

void resize_axis_free(struct resize_axis *axis);

/* Bilinear sampling of inputs `from` to `from + length`; with `smooth` what shrinks is blurred before, as
   stoker.load.decode has it. Outputs run backwards if `flip`. Returns 0 if there is no memory. */
int resize_axis_linear(struct resize_axis *axis, int side, int from, int length, int smooth, int flip);

/* A triangle as wide as the shrinking, as Pillow has it; looks beyond the edges, up to `limit` inputs. */
int resize_axis_triangle(struct resize_axis *axis, int side, double from, double length, int limit, int flip);

/* Resize RGB pixels that lie from (x.low, y.low) on, `stride` bytes a row. `middle` holds three 16-bit numbers for
   each column and 2 * RESIZE_OVERREAD more, `line` side * 3 bytes and RESIZE_OVERREAD more. */
void resize_rgb(const struct resize_axis *x, const struct resize_axis *y, const uint8_t *pixels, size_t stride,
                int columns, int side, int16_t *middle, uint8_t *line, uint8_t *out, int simd);

int resize_has_simd(void);

#endif
