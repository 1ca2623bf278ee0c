/* empty.c - a library that is all in what it needs (meson.build) still wants one translation unit. */
typedef int valve_nothing;
