/* Decode a crop of a JPEG and resize it to a square of RGB pixels, without decoding the rest of the image. */
#ifndef STOKER_CROP_H
#define STOKER_CROP_H

#include <stddef.h>
#include <stdint.h>

/* With any status but CROP_OK the output is undefined and the general decoder must handle the image. */
enum crop_status { CROP_OK = 0, CROP_UNSUPPORTED = 1, CROP_DAMAGED = 2, CROP_NO_MEMORY = 3 };

/* A crop in pixels of the image, which may start and end between pixels, and the size the image is expected to have. */
struct crop_box {
    double left, top, width, height, image_width, image_height;
};

struct crop_header {
    int width, height;
    int has_app1; /* has a segment that may hold EXIF or XMP, and thus an orientation */
};

typedef struct crop_decoder crop_decoder;

/* Create a decoder, to be used by one thread at a time. Without `simd` only libjpeg and portable code are used; the
   output is the same. */
crop_decoder *crop_new(int simd);
void crop_free(crop_decoder *decoder);

/* Parse the header, without libjpeg. */
enum crop_status crop_read_header(const uint8_t *data, size_t size, struct crop_header *header);

/* Write side * side * 3 bytes: the box of the image, resized, mirrored if `flip`. */
enum crop_status crop_decode(crop_decoder *decoder, const uint8_t *data, size_t size, const struct crop_box *box,
                             int flip, int antialias, int side, uint8_t *out);

#endif
