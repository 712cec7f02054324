// Command example embeds, ranks and asks for health: example [-api-key KEY] [-tls] HOST:PORT TEXT...
package main

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"io"
	"log"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	_ "google.golang.org/grpc/health" // asks servers for their health, as serviceConfig wants it
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"teigrpc/teiv1"
)

// Replies of EmbedAll exceed the 4 MiB that gRPC allows by default.
const maxReply = 1 << 30

// Calls go round all addresses of a dns:/// name, left out those whose health is NOT_SERVING, and calls that found no
// server, or one with too much to do, are tried again, as long as there is no answer yet.
const serviceConfig = `{
	"loadBalancingConfig": [{"round_robin": {}}],
	"healthCheckConfig": {"serviceName": ""},
	"methodConfig": [{
		"name": [{}],
		"retryPolicy": {
			"maxAttempts": 5,
			"initialBackoff": "0.1s",
			"maxBackoff": "5s",
			"backoffMultiplier": 2,
			"retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"]
		}
	}]
}`

// A dead connection is noticed during a call; idle ones are left alone. The server takes a ping every 5 seconds.
var alive = keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}

// By grpc-go's 120 seconds, a server that restarts is long missed.
var reconnect = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: time.Second, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
	MinConnectTimeout: 5 * time.Second,
}

func main() {
	key := flag.String("api-key", "", "sent as `authorization: Bearer KEY`")
	secure := flag.Bool("tls", false, "use TLS, with the system's certificates")
	flag.Parse()
	if flag.NArg() < 2 {
		log.Fatal("usage: example [-api-key KEY] [-tls] HOST:PORT TEXT...")
	}
	connection, err := connect(flag.Arg(0), *secure)
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if *key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+*key)
	}
	if err := run(ctx, connection, flag.Args()[1:]); err != nil {
		log.Fatal(err)
	}
}

func connect(address string, secure bool) (*grpc.ClientConn, error) {
	transport := grpc.WithInsecure()
	if secure {
		transport = grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{}))
	}
	return grpc.Dial(
		address,
		transport,
		grpc.WithDefaultServiceConfig(serviceConfig),
		grpc.WithKeepaliveParams(alive),
		grpc.WithConnectParams(reconnect),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReply)),
	)
}

func run(ctx context.Context, connection *grpc.ClientConn, texts []string) error {
	health, err := healthpb.NewHealthClient(connection).Check(ctx, &healthpb.HealthCheckRequest{})
	if err != nil {
		return err
	}
	fmt.Println("health:", health.GetStatus())

	client := teiv1.NewEmbedClient(connection)
	reply, err := client.Embed(ctx, &teiv1.EmbedRequest{Inputs: texts[0]})
	if err != nil {
		return err
	}
	fmt.Println("embed:", len(reply.GetEmbeddings()), "values", reply.GetEmbeddings()[:2])

	vectors, err := embed(ctx, client, texts)
	if err != nil {
		return err
	}
	for i, vector := range vectors {
		fmt.Println("stream:", i, len(vector), "values", vector[:2])
	}
	rank(ctx, teiv1.NewRerankClient(connection), texts)
	return nil
}

// embed returns one vector per text, in order, through one stream. The server reads only as far ahead as it can work.
func embed(ctx context.Context, client teiv1.EmbedClient, texts []string) ([][]float32, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the sender when an answer is an error
	stream, err := client.EmbedStream(ctx)
	if err != nil {
		return nil, err
	}
	go send(stream, texts)
	var vectors [][]float32
	for {
		reply, err := stream.Recv()
		if err == io.EOF {
			return vectors, nil
		}
		if err != nil {
			return nil, fmt.Errorf("text %d: %w", len(vectors), err)
		}
		vectors = append(vectors, reply.GetEmbeddings())
	}
}

// send stops at the first failure; Recv tells what it was.
func send(stream teiv1.Embed_EmbedStreamClient, texts []string) {
	for _, text := range texts {
		if stream.Send(&teiv1.EmbedRequest{Inputs: text}) != nil {
			return
		}
	}
	_ = stream.CloseSend()
}

// rank prints the texts by their relevance to the first one, or why the model cannot tell.
func rank(ctx context.Context, client teiv1.RerankClient, texts []string) {
	reply, err := client.Rerank(ctx, &teiv1.RerankRequest{Query: texts[0], Texts: texts})
	if err != nil {
		fmt.Println("rerank:", status.Code(err), status.Convert(err).Message())
		return
	}
	for _, rank := range reply.GetRanks() {
		fmt.Println("rerank:", rank.GetIndex(), rank.GetScore())
	}
}
