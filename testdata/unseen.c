// unseen KIND: a daemon that a look at the process list does not find. chain:
// each process forks its successor and exits; sessions: and each has a session
// of its own; hidden: it is not dumpable. It ignores TERM and ends by itself
// after 10 s.
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv) {
	char kind = argc > 1 ? *argv[1] : 'h';
	time_t end = time(0) + 10;
	signal(SIGTERM, SIG_IGN);
	if (fork()) _exit(0);
	setsid();
	prctl(PR_SET_DUMPABLE, 0);
	while (time(0) < end) {
		if (kind == 's') setsid();
		if (kind == 'h') usleep(100000);
		else if (fork() > 0) _exit(0);
	}
}
