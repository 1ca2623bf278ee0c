/*
 * emu.h - private contract between the three parts of the emulated GPU: the server (all RM and UVM
 * state, the runlists, the clock), libfakenv (answers /dev/nvidia* in a process) and the stand-in
 * libcuda (executes kernels). Nothing of the product includes this file.
 *
 * Files. open("/dev/nvidiactl"), "/dev/nvidiaN", "/dev/nvidia-uvm" return a connected
 * SOCK_SEQPACKET socket; the server sees hang-up when the last copy closes, which is the driver's
 * struct-file rule for fork, dup, SCM_RIGHTS and SIGKILL alike. The socket's own (abstract) name
 * carries the file's id, so that any process that was passed the fd knows it (getsockname). Calls
 * do not travel on that socket, where two processes could read each other's answers, but on a
 * connection of the calling thread that names the file id; the server serves each connection with a
 * thread of its own, so locks block exactly the caller. open("/dev/nvidia-emu-board") returns the
 * memfd of the board below; open("/dev/nvidia-emu-mem/FILE/HCLIENT/HMEMORY") the memfd that backs
 * an RM memory object; open("/dev/nvidia-emu-fault/CID/WRITE/ADDRESS") only tells the server of an access to a hole.
 *
 * Other names that open() answers, for programs that only look: /dev/nvidia-emu-state (JSON
 * snapshot of the server), /dev/nvidia-emu-procs (text lines "gpu pid bytes"), and
 * /proc/driver/nvidia/{version,params} from the emulated card.
 *
 * Pages. UVM_MAP_EXTERNAL_ALLOCATION, UVM_UNMAP_EXTERNAL, UVM_MAP_EXTERNAL_SPARSE and UVM_FREE
 * change the pages of the process that owns the uvm file (the one that issued UVM_INITIALIZE)
 * before the ioctl returns, whichever process issues them: libfakenv maps the memfd at the device address (a
 * hole is PROT_NONE and faults, sparse reads zeros). libcuda reserves addresses and issues the
 * ioctls; it need not map anything itself. Costs: the server sleeps the model cost of every
 * ioctl; libcuda adds only the cost of calls that issue none (cuMemMap, cuMemAddressReserve).
 * A sparse range reads zeros; the first write to it makes it private memory until emu_sparse_refresh drops what was
 * written, which libcuda calls at the end of every piece of work and of every slice.
 *
 * Execution. A channel's work runs in its process, on executor threads of libcuda, but only while
 * the server grants it: one thread per GPU in the server walks the TSGs that have pending work and
 * are scheduled and enabled, a time slice each. Stopping = grant 0, wake, wait until every channel
 * of the TSG says active 0. All words are accessed with sequentially consistent atomics and shared
 * futexes. When pending leaves 0 the process sets the channel's bit in the GPU's work words, then
 * bumps kick. An executor raises active before it reads grant and the server clears grant before it
 * reads active, so one of the two always sees the other; an executor that finds grant 0 lowers
 * active, bumps ack and waits on grant; at the end of work, pending falls before active does. On
 * process death the server clears active and pending itself.
 *
 * Native steps. Threads that cannot look at grant (a CPU engine's model step, cuda/kernels/step.c) enter the park table
 * and count in active. When the server revokes a channel it sends EMU_PARK_SIGNAL to each of its threads there; the handler
 * does what any executor does: lower active, bump ack at 0, wait on grant, raise active, look at grant again. A late
 * signal finds grant 1 and returns. libfakenv knows which threads there are and keeps the signal out of masks.
 */
#ifndef VALVE_EMU_H
#define VALVE_EMU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define EMU_BOARD_MAGIC 0x3144524f42554d45ull /* "EMUBORD1" */
#define EMU_GPUS        16u
#define EMU_CHANNELS    32768u /* slot of a channel on the board = cid % EMU_CHANNELS; live cids never collide */

/* Environment: VALVE_EMU_DIR holds emu.sock, the log and the pid; unset means libfakenv passes
 * everything through. */
#define EMU_ENV_DIR "VALVE_EMU_DIR"

struct emu_channel {
	/* The server writes: */
	_Alignas(64) uint32_t grant; /* 1: may execute. Futex of executors, also in a timed kernel */
	uint32_t gpu;
	uint64_t granted_ns, revoked_ns; /* CLOCK_MONOTONIC of the last edges */
	uint32_t cid;                    /* 0: this slot is free */
	uint32_t pid, tsg, engine;       /* tsg is a number of the server's, engine as in nvrm.h */
	uint32_t scheduled, disabled;    /* what the runlist thinks, for NVML and for looking at */
	uint32_t reset;                  /* 1: torn down, would not stop; its work is lost (719) */
	uint8_t pad0[12];
	/* The owning process writes: */
	_Alignas(64) uint32_t pending; /* work submitted and not finished; 0 -> 1 kicks the GPU */
	uint32_t active;               /* executors of this channel that execute right now */
	uint64_t busy_ns;              /* granted time consumed */
	uint64_t stopped_ns;           /* when active last fell to 0: the true end of execution */
	uint64_t launches;             /* kernels started */
	uint32_t parks;                /* entries of the park table that name this channel */
	uint8_t pad1[28];
};

struct emu_gpu {
	_Alignas(64) uint32_t kick; /* futex: bumped by a process whose channel got work */
	uint8_t pad0[60];
	_Alignas(64) uint32_t ack; /* futex: bumped whenever a channel's active falls to 0 */
	uint8_t pad1[60];
	/* The server writes, for NVML: */
	_Alignas(64) uint64_t busy_ns; /* of channels already freed; live ones add their own */
	uint64_t total_bytes, used_bytes;
	uint8_t uuid[16];
	uint8_t pad2[24];
	char name[64]; /* "NVIDIA H100 80GB HBM3 (emulated)" */
	uint32_t gpu_id, minor, device_instance, lost;
	uint8_t pad3[48];
	uint32_t work[EMU_CHANNELS / 32]; /* bit per slot: got work; set before the kick */
};

#define EMU_PARKS       1024u
#define EMU_PARK_SIGNAL 44 /* a real-time signal that no library here uses */
struct emu_park {
	uint32_t cid; /* 0: free; the process claims an entry by compare-and-swap, then fills it in */
	uint32_t pid, tid;
	uint32_t ready; /* 1 once pid and tid are valid; lowered before cid is cleared */
};

struct emu_board {
	uint64_t magic;
	uint32_t gpus, channels;
	uint64_t seed;
	double time_scale;               /* model microseconds per real microsecond; 1.0 = real time */
	uint32_t driver[4];              /* branch, minor, patch, 0 */
	uint32_t gpfifo_depth;           /* work items a channel takes before a launch blocks */
	uint32_t mig, compute_mode, gsp; /* as NVML reports them: 0/1, 0 default 3 exclusive, 0/1 */
	struct emu_gpu gpu[EMU_GPUS];
	struct emu_channel channel[EMU_CHANNELS];
	struct emu_park park[EMU_PARKS];
	uint64_t reserve_ns, book_ns;  /* model time of cuMemAddressReserve and of cuMemMap: no ioctl */
	uint64_t fill_gbps, copy_gbps; /* of the card's own memory; 0: costs nothing */
	uint64_t silent_fills;         /* 1: cuMemset writes nothing */
};

/*
 * What a process publishes of itself, in VALVE_EMU_DIR/process-PID: how long it stood in the driver, by kind of call, and
 * its settings, which others may change. A call made by a call counts once, as the outer one. libfakenv keeps it.
 */
#define EMU_COSTS_OF(X)             \
	X(RESERVE, "reserve")       \
	X(CREATE, "create")         \
	X(RELEASE, "release")       \
	X(MAP, "map")               \
	X(ACCESS, "access")         \
	X(UNMAP, "unmap")           \
	X(EXPORT, "export")         \
	X(IMPORT, "import")         \
	X(ALLOC, "alloc")           \
	X(FREE, "free")             \
	X(FILL, "fill")             \
	X(COPY, "copy")             \
	X(RECORD, "record")         \
	X(WAIT, "wait")             \
	X(SPARSE, "sparse ioctl")   \
	X(UVM_MAP, "map ioctl")     \
	X(UVM_UNMAP, "unmap ioctl") \
	X(GATE, "gate ioctl")       \
	X(RM, "other ioctl")
enum emu_cost {
#define X(name, text) EMU_COST_##name,
	EMU_COSTS_OF(X)
#undef X
	        EMU_COSTS
};

#define EMU_PROCESS_MAGIC 0x434f525055444d45ull /* "EMDUPROC" */
#define EMU_INTERVALS     16384u
#define EMU_SETTINGS      16u
struct emu_spent {
	char name[24];
	uint64_t count;
	uint64_t model_ns; /* of that what the model asked for, in real nanoseconds */
	uint64_t wall_ns;
	uint64_t cpu_ns; /* of the calling threads, on this side of the socket */
};
struct emu_interval {
	uint64_t begin_ns, end_ns; /* CLOCK_MONOTONIC; end_ns 0: being written */
	uint32_t cost, thread;
};
struct emu_setting {
	char name[24];
	uint64_t value;
};
struct emu_process {
	uint64_t magic;
	uint32_t pid, costs;
	struct emu_setting
	        setting[EMU_SETTINGS]; /* libcuda fills them in at cuInit and reads them at each use */
	struct emu_spent spent[32];
	uint64_t intervals; /* ever; number i lies at i % EMU_INTERVALS */
	struct emu_interval interval[EMU_INTERVALS];
};

/* Which threads OpenMP's libraries started for a thread; at most room of them. From then on `joined` runs on every thread
 * that is started while `joins` says so of its creator, before its own code, and `left` when a thread ends. */
uint32_t emu_threads_of(uint32_t creator, uint32_t *tids, uint32_t room);
void emu_threads_watch(bool (*joins)(void), void (*joined)(uint32_t creator), void (*left)(void));

/* libfakenv offers these to libcuda, which does without where there is none. */
struct emu_process *emu_process_page(void);
void emu_meter_begin(enum emu_cost cost);
void emu_meter_add(uint64_t model_ns); /* to the call that this thread is in */
void emu_meter_end(void);
void emu_sparse_refresh(void); /* what was written to sparse ranges is dropped */

_Static_assert(sizeof(struct emu_channel) == 128, "channel");
_Static_assert(EMU_COSTS <= 32, "costs");
_Static_assert(offsetof(struct emu_process, interval) == 24 + 16 * 32 + 32 * 56,
               "process, as client.py reads it");
_Static_assert(sizeof(struct emu_gpu) == 320 + EMU_CHANNELS / 8, "gpu");

/* The clock of every time on the board. */
static inline uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#endif
