/*
 * main.c - starts the emulated node: the board, one thread per GPU, the socket. Ends on SIGTERM or
 * SIGINT. valve-emu-server --dir DIR [--gpus N] [--bytes B] [--name TEXT] [--seed N] [--set k=v]...
 * [--fault LINE]... VALVE_EMU_SET ("k=v,k=v") is read first, so a flag wins.
 */
#include "server.h"
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

struct server S;

enum { STACK_BYTES = 512 * 1024 };

static struct options {
	uint64_t bytes;
	const char *name;
} options = {80ull << 30, "NVIDIA H100 80GB HBM3 (emulated)"};

static void die(const char *what)
{
	fprintf(stderr, "valve-emu-server: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void refuse(const char *what, const char *why)
{
	fprintf(stderr, "valve-emu-server: %s: %s\n", what, why);
	exit(2);
}

static void set_pair(const char *pair)
{
	char copy[256];
	char *equals;
	const char *wrong;

	snprintf(copy, sizeof copy, "%s", pair);
	equals = strchr(copy, '=');
	if (!equals)
		refuse(pair, "expected name=value");
	*equals = 0;
	wrong = setting(copy, equals + 1);
	if (wrong)
		refuse(pair, wrong);
}

static void set_from_environment(void)
{
	const char *text = getenv("VALVE_EMU_SET");
	char *copy = text ? strdup(text) : NULL, *save, *pair;

	for (pair = copy ? strtok_r(copy, ",", &save) : NULL; pair; pair = strtok_r(NULL, ",", &save))
		set_pair(pair);
	free(copy);
}

/* A stable identity per seed: the same demo shows the same cards (splitmix64). */
static uint64_t mix(uint64_t *state)
{
	uint64_t z = (*state += 0x9E3779B97F4A7C15ull);

	z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
	z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
	return z ^ (z >> 31);
}

static void make_gpu(uint32_t i)
{
	struct emu_gpu *b = &S.board->gpu[i];
	uint64_t state = S.seed + i, word;

	for (int half = 0; half < 2; half++) {
		word = mix(&state);
		memcpy(b->uuid + 8 * half, &word, 8);
	}
	b->uuid[6] = (uint8_t)((b->uuid[6] & 0x0F) | 0x40); /* a version 4 UUID, as nvidia-smi prints */
	b->uuid[8] = (uint8_t)((b->uuid[8] & 0x3F) | 0x80);
	snprintf(b->name, sizeof b->name, "%s", options.name);
	b->total_bytes = options.bytes;
	b->gpu_id = (3 + i) << 8;
	b->minor = i;
	b->device_instance = i;
	S.gpu[i].index = i;
	S.gpu[i].board = b;
	TAILQ_INIT(&S.gpu[i].tsgs);
	TAILQ_INIT(&S.gpu[i].ready);
}

static void make_board(void)
{
	S.board_fd = memfd_create("valve-emu-board", MFD_CLOEXEC);
	if (S.board_fd < 0 || ftruncate(S.board_fd, sizeof *S.board))
		die("board");
	S.board = mmap(NULL, sizeof *S.board, PROT_READ | PROT_WRITE, MAP_SHARED, S.board_fd, 0);
	if (S.board == MAP_FAILED)
		die("board");
	S.board->magic = EMU_BOARD_MAGIC;
	S.board->channels = EMU_CHANNELS;
}

static void finish_board(void)
{
	S.board->gpus = S.gpus;
	S.board->seed = S.seed;
	board_follow_knobs();
	S.board->time_scale = (double)knob(K_time_scale) / 1000.0;
	for (uint32_t i = 0; i < S.gpus; i++)
		make_gpu(i);
}

static int write_file(const char *name, const char *format, const char *text)
{
	char path[sizeof S.dir + 64];
	FILE *f;

	snprintf(path, sizeof path, "%s/proc/%s", S.dir, name);
	f = fopen(path, "we");
	if (!f)
		return -1;
	fprintf(f, format, text);
	return fclose(f);
}

/* What a reader of /proc/driver/nvidia finds (O/nvidia/nv-procfs.c). */
int proc_files_write(void)
{
	char path[sizeof S.dir + 64], driver[64];

	driver_text(driver);
	snprintf(path, sizeof path, "%s/proc", S.dir);
	if (mkdir(path, 0755) && errno != EEXIST)
		return -1;
	if (write_file("version",
	               "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  %s  Release Build "
	               " (emulated)\n"
	               "GCC version:  none\n",
	               driver))
		return -1;
	return write_file("params", "EnableGpuFirmware: 18\nOpenRmEnableUnsupportedGpus: 1\n%s", "");
}

/* Held until this process ends: another server would take the socket over, and programs would be on two cards at once. */
static void take_dir(void)
{
	enum {
		TRIES = 300,
		PAUSE_NS = 10000000
	}; /* a predecessor that has closed its socket ends within this */
	int fd = open(S.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0)
		die(S.dir);
	for (int tries = 0; flock(fd, LOCK_EX | LOCK_NB); tries++) {
		if (errno != EWOULDBLOCK)
			die(S.dir);
		if (tries == TRIES)
			refuse(S.dir,
			       "another valve-emu-server has this folder's card already: end that one first");
		nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
	}
}

static int make_socket(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if ((size_t)snprintf(address.sun_path, sizeof address.sun_path, "%s/%s", S.dir, EMU_SOCKET) >=
	    sizeof address.sun_path)
		refuse(S.dir, "the path of the directory is too long for a socket");
	unlink(address.sun_path);
	if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 512))
		die(address.sun_path);
	chmod(address.sun_path, 0666);
	return fd;
}

static void *accept_thread(void *argument)
{
	int listener = (int)(intptr_t)argument, sock;
	pthread_attr_t attributes;
	pthread_t thread;

	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	for (;;) {
		sock = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		if (sock < 0)
			continue;
		if (pthread_create(&thread, &attributes, connection_thread, (void *)(intptr_t)sock))
			close(sock);
	}
	return NULL;
}

static void *watch_thread(void *unused)
{
	(void)unused;
	files_watch();
	return NULL;
}

static void read_options(int argc, char **argv)
{
	static const struct option table[] = {
	        {"dir", 1, NULL, 'd'},   {"gpus", 1, NULL, 'g'}, {"bytes", 1, NULL, 'b'},
	        {"name", 1, NULL, 'n'},  {"seed", 1, NULL, 's'}, {"set", 1, NULL, 'k'},
	        {"fault", 1, NULL, 'f'}, {NULL, 0, NULL, 0},
	};
	const char *wrong;
	int at;

	while ((at = getopt_long(argc, argv, "", table, NULL)) >= 0) {
		if (at == 'd')
			continue; /* read before the rest, which writes into it */
		if (at == 'g')
			S.gpus = (uint32_t)strtoul(optarg, NULL, 10);
		else if (at == 'b')
			options.bytes = strtoull(optarg, NULL, 0);
		else if (at == 'n')
			options.name = optarg;
		else if (at == 's')
			S.seed = strtoull(optarg, NULL, 0);
		else if (at == 'k')
			set_pair(optarg);
		else if (at == 'f' && (wrong = fault_add(optarg)) != NULL)
			refuse(optarg, wrong);
		else if (at == '?')
			exit(2);
	}
	if (S.gpus < 1 || S.gpus > EMU_GPUS)
		refuse("--gpus", "1 to 16");
}

static void read_dir(int argc, char **argv)
{
	const char *dir = getenv(EMU_ENV_DIR);

	for (int i = 1; i + 1 < argc; i++)
		if (strcmp(argv[i], "--dir") == 0)
			dir = argv[i + 1];
	if (!dir || (mkdir(dir, 0755) && errno != EEXIST) || !realpath(dir, S.dir))
		die("--dir");
}

/* A card has processors of its own: where permitted, ours do not queue behind the host's programs. All threads made
 * later inherit this; each of them only ever runs for microseconds between two waits. */
static void leave_the_queue(void)
{
	struct sched_param priority = {.sched_priority = 1};

	if (knob(K_realtime))
		sched_setscheduler(0, SCHED_RR, &priority);
}

int main(int argc, char **argv)
{
	struct rlimit files = {0};
	char driver[64];
	pthread_t thread;
	sigset_t ends;
	int listener, signal_number;

	signal(SIGPIPE, SIG_IGN);
	prctl(PR_SET_TIMERSLACK, 1);
	getrlimit(RLIMIT_NOFILE, &files);
	files.rlim_cur = files.rlim_max;
	setrlimit(RLIMIT_NOFILE, &files);
	sigemptyset(&ends);
	sigaddset(&ends, SIGTERM);
	sigaddset(&ends, SIGINT);
	pthread_sigmask(SIG_BLOCK, &ends, NULL);

	TAILQ_INIT(&S.clients);
	TAILQ_INIT(&S.files);
	S.gpus = 1;
	S.seed = 1;
	S.nonce = (uint32_t)getpid() ^ (uint32_t)now_ns();
	S.next_file = (uint64_t)S.nonce << 32; /* no file of another card is ever taken for one of this */
	locks_init();
	read_dir(argc, argv);
	make_board();
	knobs_preset();
	set_pair("driver=580.159.04");
	set_from_environment();
	read_options(argc, argv);
	take_dir();
	finish_board();
	leave_the_queue();
	if (files_init() || runlists_start())
		die("threads");
	driver_text(driver);
	listener = make_socket();
	pthread_create(&thread, NULL, watch_thread, NULL);
	pthread_create(&thread, NULL, accept_thread, (void *)(intptr_t)listener);
	printf("valve-emu-server: %u x %s, driver %s, seed %llu, %s/%s\n", S.gpus, options.name, driver,
	       (unsigned long long)S.seed, S.dir, EMU_SOCKET);
	fflush(stdout);
	sigwait(&ends, &signal_number);
	return 0;
}
