/*
 * wire.h - what libfakenv, the stand-in NVML and the Python client say to valve-emu-server on
 * emu.sock (SOCK_SEQPACKET).
 *
 * Every connection opens with a hello and is answered by a welcome. What it is good for afterwards:
 *   CTL, NODE, UVM  an open file. Nothing more is sent: the connection only tells the server when
 * the last copy closes. CALLS           ioctls and look-ups of one thread: struct emu_call + bytes,
 * answered by struct emu_reply + bytes. PAGES           the server asks the owner of a uvm file to
 * change its mappings (struct emu_page_op, fd attached). ADMIN           one text command per
 * packet; answers come in packets that start with '+' (more) or '.' (last).
 */
#ifndef VALVE_EMU_WIRE_H
#define VALVE_EMU_WIRE_H

#include <stdint.h>

#define EMU_WIRE_MAGIC 0x33554d45u /* "EMU3": raised with every change here */
#define EMU_SOCKET     "emu.sock"  /* in VALVE_EMU_DIR */
#define EMU_NAME_FORMAT \
	"valve-emu/%08x/%u/%u/%llu" /* abstract name of a file's socket: nonce, kind, minor, id */
#define EMU_PARAMS_MAX  65536u
#define EMU_MESSAGE_MAX (EMU_PARAMS_MAX + 32768u)
#define EMU_NO_FILE     (~0ull)

enum emu_kind {
	EMU_CTL = 1,
	EMU_NODE = 2,
	EMU_UVM = 3,
	EMU_CALLS = 4,
	EMU_PAGES = 5,
	EMU_ADMIN = 6,
};

struct emu_hello {
	uint32_t magic, kind, minor, pad0;
	uint64_t file; /* PAGES: the uvm file whose pages this connection changes */
};

struct emu_welcome {
	int32_t error; /* errno value for the caller of open() */
	uint32_t nonce;
	uint64_t file;
};

enum emu_op {
	EMU_OP_IOCTL = 1,
	EMU_OP_BOARD = 2,  /* answered with the board's memfd */
	EMU_OP_MEMORY = 3, /* answered with the memfd behind (file, h_client, h_memory) */
	EMU_OP_STATE = 4,  /* answered with a memfd that holds the JSON snapshot */
	EMU_OP_PROCS = 5,  /* answered with a memfd of text lines "gpu pid bytes" */
	EMU_OP_FAULT =
	        6, /* channel h_client met a hole at address `nodes`; h_memory 1: writing. No answer but
	                      ENOENT */
};

struct emu_call {
	uint32_t op;
	uint32_t request;     /* the escape number, or UVM's raw request */
	uint32_t arg_size;    /* bytes of the ioctl's own struct, right behind this header */
	uint32_t params_size; /* bytes behind the pointer in it, after those */
	uint64_t file;        /* the fd the ioctl was issued on */
	uint64_t other;       /* the file behind a fd inside the struct, or EMU_NO_FILE */
	uint64_t nodes;       /* for the allocation of a device: bit N = the caller holds a fd of
	                         /dev/nvidiaN */
	uint32_t h_client, h_memory;
};

struct emu_reply {
	int32_t error; /* 0 or the errno of ioctl() */
	uint32_t arg_size, params_size, pad0;
	uint64_t model_ns; /* what the model made this call sleep, in real nanoseconds */
};

enum emu_page_kind { EMU_PAGE_MAP = 1, EMU_PAGE_HOLE = 2, EMU_PAGE_SPARSE = 3 };

/* Also follows a reply to one of UVM's mapping ioctls when the caller is the owner: it changes its
 * pages itself. */
struct emu_page_op {
	uint32_t kind, seq;
	uint64_t base, length, offset;
};

#endif
