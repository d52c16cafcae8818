/* A part of a JPEG, decoded and resized into a square of RGB pixels; no pixel far outside that part is made. */
#ifndef STOKER_CROP_H
#define STOKER_CROP_H

#include <stddef.h>
#include <stdint.h>

/* Everything but CROP_OK means: nothing can be said of the pixels, let the general decoder look at it. */
enum crop_status { CROP_OK = 0, CROP_UNSUPPORTED = 1, CROP_DAMAGED = 2, CROP_NO_MEMORY = 3 };

/* In pixels of the image, whose size is told too; edges may lie between them. */
struct crop_box {
    double left, top, width, height, image_width, image_height;
};

struct crop_look {
    int width, height;
    int may_be_turned; /* there is a segment that could hold EXIF or XMP */
};

typedef struct crop_decoder crop_decoder;

/* One for each thread. Without `simd` libjpeg and portable code do it all, and give the same bytes. */
crop_decoder *crop_new(int simd);
void crop_free(crop_decoder *decoder);

/* Read the size from a header, without libjpeg. */
enum crop_status crop_look(const uint8_t *data, size_t size, struct crop_look *found);

/* Fill side * side * 3 bytes with the box of the image, mirrored if `flip`. */
enum crop_status crop_fill(crop_decoder *decoder, const uint8_t *data, size_t size, const struct crop_box *box,
                           int flip, int antialias, int side, uint8_t *out);

#endif
